"""The parameters of a run: one model behind the UI form, `--param-file` and the flags.

Knows names, types, ranges and defaults; does not know files or servers. Invariant: no secret is ever a
parameter; the server's key comes from the environment (DRAFTMILL_API_KEY).
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from tasks.prepare.adapters.fields import find_taken_kwargs
from tasks.prepare.sources import is_hub_source, spell_hub_source

DatasetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
AdapterName = Literal[  # spelled out: a form's choices
    "glaive",
    "magicoder",
    "messages",
    "mixturethoughts",
    "opencodeinstruct",
    "openthoughts",
    "prompt",
    "sharegpt",
    "sweagent",
    "text",
    "ultrachat",
]
ExportFormat = Literal["parquet", "jsonl", "arrow", "vocab", "conversations"]
# In the form's schema too, which Prefect's server checks before there is a run; the sentences are ours.
BaseUrl = Annotated[str, WithJsonSchema({"type": "string", "pattern": "^https?://"})]
_NAMES_OF_OURS = (
    *("export", "run.json", "stats.json", "stats.parquet", "report.html"),
    *("server.log", "prefect.log"),
)
_TAKEN = rf"^({'|'.join(re.escape(name) for name in _NAMES_OF_OURS)})$|\.lock$"


_LAUNCH_ONLY = ("profile", "preset", "launch_flags", "python", "port", "restarts", "load_timeout_s")
_EMBEDDED_ONLY = ("slots", "context_length")
_FOR_OTHER_MODES = {
    "connect": (*_LAUNCH_ONLY, *_EMBEDDED_ONLY),
    "launch": ("base_urls", *_EMBEDDED_ONLY),
    "embedded": ("base_urls", *_LAUNCH_ONLY),
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Target(_Section):
    """The big model whose answers are collected."""

    model: str | None = None
    """Hub id or folder of the target model; empty takes what the server says it serves."""
    tokenizer: str | None = None
    """Hub id or folder of its tokenizer; empty means the same as model."""
    revision: str | None = None
    """Revision of the model on the Hub."""
    trust_remote_code: bool = False
    """Run the tokenizer's own Python code (Kimi's needs it); only for models you trust."""
    tool_calls_as_text: bool = False
    """Where the chat template shows no tool calls, write those in a prompt's history as text, in a form that
    is not the model's own; without it such prompts are refused."""


class Server(_Section):
    """Where the target model is served."""

    mode: Literal["connect", "launch", "embedded"] = "connect"
    """connect: to running SGLang servers. launch: start one here. embedded: a small model on the CPU."""
    base_urls: list[BaseUrl] = ["http://127.0.0.1:30000"]
    """Base URLs of the servers (mode connect); requests go to the least loaded one."""
    ready_timeout_s: float = Field(120.0, gt=0)
    """How long to wait for the servers to answer before the run is refused (seconds)."""
    request_timeout_s: float = Field(3600.0, gt=0)
    """How long one answer may take (seconds)."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """How long a server may do nothing with requests in flight before they are asked again (seconds)."""
    outage_timeout_s: float = Field(1800.0, gt=0)
    """How long all servers may be away in mid-run before a dataset fails (seconds)."""
    measure_s: float = Field(5.0, ge=0, le=60)
    """How long the speed is measured before the plan is shown (seconds); a short run does without, 0 too."""
    profile: str | None = None
    """Mode launch: the hardware that SGLang is set up for; draftmill serve --profiles lists what there is."""
    preset: str | None = None
    """Mode launch: a preset of the profile."""
    launch_flags: dict[str, str | bool | int | float | None] = {}
    """Mode launch: flags over the profile's, {"context-length": 32768}; false or null leaves one out."""
    python: str | None = None
    """Mode launch: the interpreter that SGLang is installed in; empty takes the sglang on PATH."""
    port: int = Field(30000, ge=1, le=65535)
    """Mode launch: where SGLang listens, on this machine only."""
    restarts: int = Field(3, ge=0)
    """Mode launch: how often a server that dies or freezes is started again."""
    load_timeout_s: float = Field(3600.0, gt=0)
    """Mode launch: how long one start may take, loading the weights (seconds)."""
    slots: int = Field(8, ge=1, le=64)
    """Requests that the embedded server works on at once."""
    context_length: int = Field(2048, ge=128)
    """Context of the embedded server (tokens)."""

    def find_unused(self) -> list[str]:
        """What was set, and is only for another mode."""
        fields = type(self).model_fields
        return [name for name in _FOR_OTHER_MODES[self.mode] if getattr(self, name) != fields[name].default]

    @field_validator("launch_flags", mode="before")
    @classmethod
    def _check_flags(cls, flags: object) -> object:
        given = flags if isinstance(flags, dict) else {}
        odd = {name: value for name, value in given.items() if isinstance(value, list | dict)}
        for name, value in odd.items():  # one sentence, where the union would make five
            raise ValueError(
                f"{name!r} is {value!r}; write a text, a number, true for a switch, or false or null to "
                "leave out what the profile sets"
            )
        return flags

    @field_validator("base_urls")
    @classmethod
    def _check_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if "@" in url:  # it would be in every row; not repeated here, for it may hold a password
                raise ValueError("a URL holds a user or password (@); give the key as DRAFTMILL_API_KEY")
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} does not start with http:// or https://; write http://HOST:PORT")
        return urls

    @model_validator(mode="after")
    def _check_mode(self) -> "Server":
        if self.mode == "connect" and not self.base_urls:
            raise ValueError("server.base_urls is empty: mode connect needs at least one URL")
        if self.mode == "launch" and not self.profile:
            raise ValueError("server.profile is empty: mode launch needs one (draftmill serve --profiles)")
        return self


class Sampling(_Section):
    """How answers are sampled; sent to the server as it is."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(-1, ge=-1)
    """-1 keeps all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Least probability relative to the best token's."""
    seed: int | None = Field(None, ge=0)
    """Makes each prompt's sampling repeatable where the server supports it; empty is random."""


class DatasetSampling(_Section):
    """One dataset's own sampling; what is empty is as in the run."""

    temperature: float | None = Field(None, ge=0)
    """0 is greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int | None = Field(None, ge=-1)
    """-1 keeps all tokens."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Least probability relative to the best token's."""


class LaneSettings(_Section):
    """One size class of prompts."""

    concurrency: int = Field(ge=1, le=100_000)
    """Requests in flight at once."""
    max_new_tokens: int = Field(ge=1)
    """Longest answer (tokens)."""


class Lanes(_Section):
    """Short and long prompts have windows of their own."""

    concurrency: Literal["fixed", "auto"] = "fixed"
    """auto: follow the servers' load, a quarter to four times these, but not past --max-running-requests."""
    long_prompt_tokens: int = Field(4096, ge=1)
    """Prompts of this many tokens or more take the long lane."""
    short: LaneSettings = LaneSettings(concurrency=150, max_new_tokens=10240)
    """Prompts below long_prompt_tokens."""
    long: LaneSettings = LaneSettings(concurrency=32, max_new_tokens=16384)
    """Prompts of long_prompt_tokens or more."""


class DatasetSettings(_Section):
    """One dataset: where its prompts come from and what is special about it."""

    name: DatasetName = Field(json_schema_extra={"not": {"pattern": _TAKEN}})
    """Names the folder under output_dir."""
    source: str
    """File, folder or glob (JSONL, JSON or parquet; relative to the parameter file), or hub:ORG/NAME."""
    revision: str | None = None
    """Source on the Hub: branch, tag or commit; empty is the main branch."""
    subset: str | None = None
    """Source on the Hub: which of its subsets (configurations); empty is its default one."""
    split: str | None = None
    """Source on the Hub: which of its splits; empty is train."""
    adapter: AdapterName
    """Which row format the source has (glaive, magicoder, messages, mixturethoughts, opencodeinstruct,
    openthoughts, prompt, sharegpt, sweagent, text, ultrachat)."""
    kind: Literal["generate", "trajectory"] = "generate"
    """generate: the target answers. trajectory: the source has the target's own finished conversations."""
    turns: Literal["last", "each", "independent"] = "last"
    """Kind generate. last: answer the last turn, on the row's history. each: answer every turn in order,
    on the target's own answers. independent: answer every turn, on the row's history (tools, agents)."""
    budget_tokens: int | None = Field(None, ge=1)
    """Completion tokens for this dataset; empty means max_tokens_per_dataset. A trajectory has none."""
    system_prompt: str | None = None
    """Put first where a conversation has no system prompt."""
    keep_system_prompts: bool = True
    """Keep the rows' own system prompts; false drops them."""
    max_prompts: int | None = Field(None, ge=1)
    """Prepare at most this many prompts, the first of the seeded order; raise it to go on. Empty is all."""
    chat_template_kwargs: dict[str, Any] = {}
    """Handed to the chat template, for example {"thinking": false}."""
    sampling: DatasetSampling = DatasetSampling()
    """What is sampled otherwise than in the rest of the run."""
    expected_mean_tokens: float | None = Field(None, gt=0)
    """Average answer length to plan with until answers are in (tokens)."""

    @field_validator("turns", "budget_tokens", "system_prompt", "keep_system_prompts")
    @classmethod
    def _check_kind(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("kind") == "trajectory" and value not in (None, "last", True):
            raise ValueError(
                f"kind 'trajectory' takes conversations as they are and generates nothing, so there is no "
                f"{info.field_name} (it is {value!r}); leave it out, or write kind 'generate'"
            )
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if taken := find_taken_kwargs(kwargs):
            raise ValueError(f"{taken[0]!r} is not the template's to take; leave it out")
        return kwargs

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if re.search(_TAKEN, name.lower()):
            raise ValueError(
                f"a dataset cannot be named {name!r}: output_dir has an entry of that name already; write "
                f"another one, for example {f'{name}-1'!r}"
            )
        return name

    @model_validator(mode="after")
    def _check_source(self) -> "DatasetSettings":
        for name in ("revision", "subset", "split"):
            if getattr(self, name) is not None and not is_hub_source(self.source):
                raise ValueError(f"{name} is for a source on the Hub (hub:ORG/NAME), not for {self.source!r}")
        return self

    @property
    def full_source(self) -> str:
        """The source with what picks its rows on the Hub."""
        if not is_hub_source(self.source):
            return self.source
        return spell_hub_source(self.source, revision=self.revision, subset=self.subset, split=self.split)


class Export(_Section):
    """What is written for the trainers."""

    eval_fraction: float = Field(0.02, ge=0, lt=1)
    """Share of conversations held out for evaluation; those with the same first user turn stay together."""
    formats: list[ExportFormat] = ["parquet", "jsonl", "arrow", "vocab"]
    """parquet: with all columns. jsonl: id, input_ids and loss_mask only (SpecForge, speculators). arrow: a
    load_from_disk folder (speculators). vocab: the draft vocabulary, by how often the target says each id.
    conversations: text, for trainers that tokenize it again; lossy, with the measured share of changes."""
    draft_vocab_size: int | None = Field(None, ge=0)
    """How many ids the draft model has, at most the target's; 0 leaves the vocabulary out. Empty is 32,000,
    or as many as a smaller target has."""
    drop_duplicates: bool = False
    """Leave out rows that have the token ids and the mask of an earlier row, of whatever dataset."""
    decontaminate: list[str] = []
    """Files of evaluation sets (.jsonl, .json, .parquet, .txt by lines): rows with 13 words in a row that are
    in one of their texts are left out. A relative path starts in the parameter file's folder."""
    partial: bool = False
    """Export datasets that have not reached their budget too."""


class RunParameters(_Section):
    """Everything that decides a run."""

    target: Target = Target()
    """The model whose answers are collected."""
    server: Server = Server()
    """Where it is served."""
    datasets: list[str | DatasetSettings] = Field(min_length=1)
    """Names from the catalog (datasets.toml), or datasets spelled out."""
    max_tokens_per_dataset: int = Field(10_000_000, ge=1)
    """Budget of completion tokens for each dataset that does not set its own."""
    max_samples: int | None = Field(None, ge=1)
    """At most this many responses per dataset; empty is no limit."""
    sampling: Sampling = Sampling()
    """How answers are sampled."""
    lanes: Lanes = Lanes()
    """Windows for short and long prompts."""
    budget_policy: Literal["forecast", "drain"] = "forecast"
    """forecast: stop asking when what is in flight will land on the budget. drain: when it is reached."""
    on_length: Literal["keep", "reject"] = "keep"
    """What becomes of answers that were cut at max_new_tokens."""
    max_attempts: int = Field(5, ge=1)
    """How often one prompt is tried before it is rejected."""
    dataset_retries: int = Field(2, ge=0)
    """How often a dataset that failed or crashed is tried again by itself."""
    dataset_retry_delay_s: float = Field(60.0, ge=0)
    """Wait before such a retry (seconds)."""
    concurrent_datasets: int = Field(1, ge=1)
    """Datasets at work at once: in one process they share the windows, as runs of their own each has both."""
    seed: int = 0
    """Of the prompt order and the train/eval split."""
    export: Export = Export()
    """Which files the trainers get."""
    output_dir: str = Field("data/run", min_length=1)
    """Where everything is written; running again with the same folder resumes."""
    accept_changed: list[str] = []
    """Fingerprint fields that may differ from those the output folder was made with."""
    retry_rejected: bool = False
    """Ask again the prompts that were rejected for good."""

    @field_validator("datasets")
    @classmethod
    def _check_names(cls, datasets: list[str | DatasetSettings]) -> list[str | DatasetSettings]:
        names = [one if isinstance(one, str) else one.name for one in datasets]
        folders = [name.lower() for name in names]  # not every filesystem tells capitals apart
        if twice := sorted(name for name in names if folders.count(name.lower()) > 1):
            raise ValueError(f"{', '.join(twice)} would share a folder; give each a name of its own")
        return datasets

    @model_validator(mode="after")
    def _check_launch(self) -> "RunParameters":
        if self.server.mode == "launch" and not self.target.model:
            raise ValueError("target.model is empty: mode launch needs the model that SGLang is to serve")
        return self


def describe_parameters() -> str:
    """Every parameter with its default and its sentence, as commented YAML."""
    lines = _describe(RunParameters(datasets=["B2_opencodeinstruct"]), "")
    lines += ["", "# A dataset that is spelled out takes, besides name, source and adapter:"]
    example = DatasetSettings(name="mine", source="prompts/mine.jsonl", adapter="messages")
    return "\n".join(lines + _describe(example, "# "))


def _describe(section: BaseModel, indent: str) -> list[str]:
    lines = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        lines += [f"{indent}# {line}" for line in (field.description or "").splitlines()]
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", *_describe(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}")
    return lines
