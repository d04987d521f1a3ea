"""What `draftmill preview` does: a few prompts or rows of each dataset, shown as the model sees them.

Knows where the tokenizer, the sources and the rows are; what is shown is made in `tasks.prepare.preview`.
Invariant: nothing is written, and a server is asked only where nothing else names the tokenizer.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rich.console import Console

from flows.catalog import InputError, list_datasets
from flows.cli.check_run import shown_logs
from flows.opening import to_lanes, to_prepare_options, to_warm_up_rules
from flows.parameters import DatasetSettings, RunParameters
from flows.servers import name_model
from tasks.prepare.adapters import hash_content
from tasks.prepare.preparation import adapt_rows
from tasks.prepare.preview import Previewer, Shown, say_rejected, show_response
from tasks.prepare.preview_view import TokenView, spell_out
from tasks.prepare.sample import SAMPLE_ROWS
from tasks.prepare.sources import SourceError, resolve_source
from tasks.records import exact_json
from tasks.records.response_log import RESPONSES, parse_line, read_lines
from tasks.records.rows import RecordError, Rejected, Response
from tasks.records.run_file import RunFolderError, read_run_file
from tasks.tokens.tokenizer import TargetTokenizer, load_tokenizer
from tasks.warm_up.open_session import load_served_target

_LONGEST_WAIT_S = 10.0  # for a server: somebody is looking at the screen


@dataclass(frozen=True, slots=True)
class PreviewRules:
    """How much to show, and of what; `on_disk` None takes finished rows where there are any."""

    rows: int = 3
    on_disk: bool | None = None
    whole: bool = False


def preview_datasets(parameters: RunParameters, rules: PreviewRules, console: Console) -> None:
    """Print some prompts or rows of each dataset.

    Raises:
        InputError: a source or a row cannot be read, or there are no rows.
        TokenizerError, EmbeddedError, ServingError: there is no tokenizer.
    """
    with shown_logs():  # of a demo model that is fetched, or a server that is waited for
        name = _name_tokenizer(parameters)
        target, context_length = _load_target(parameters, name)
    previewer = Previewer(
        target,
        calls_as_text=parameters.target.tool_calls_as_text,
        lanes=to_lanes(parameters),
        long_prompt_tokens=parameters.lanes.long_prompt_tokens,
        context_length=context_length,
    )
    preview = _Preview(parameters, rules, console, target, previewer)
    may_differ = name is not None and parameters.server.mode != "embedded"
    context = "not known" if context_length is None else f"{context_length:,} tokens"
    _print(console, f"tokenizer {target.name}, context {context}{' (a server may have less)' * may_differ}")
    for dataset in list_datasets(parameters):
        try:
            preview.show(dataset)
        except (SourceError, OSError) as exc:
            raise InputError(f"dataset {dataset.name!r}: {exc}") from exc
        except (RecordError, RunFolderError) as exc:
            raise InputError(str(exc)) from exc


@dataclass(frozen=True, slots=True)
class _Preview:
    parameters: RunParameters
    rules: PreviewRules
    console: Console
    target: TargetTokenizer
    previewer: Previewer

    def show(self, dataset: DatasetSettings) -> None:
        """Rows on disk, or prompts of the source."""
        path = Path(self.parameters.output_dir) / dataset.name / RESPONSES
        responses = [] if self.rules.on_disk is False else list(_read_responses(path, self.rules.rows))
        if self.rules.on_disk and not responses:
            raise InputError(f"{path} has no rows yet; leave out --on-disk to see prompts of the source")
        if responses:
            self._show_responses(dataset, path, responses)
        else:
            self._show_source(dataset)

    def _show_responses(self, dataset: DatasetSettings, path: Path, responses: list[Response]) -> None:
        _print(self.console, f"\n{dataset.name}: the first rows of {path} (--source: prompts instead)")
        made_with = read_run_file(path.parent.parent).get("fingerprint", {}).get("tokenizer_sha256")
        if made_with not in (None, self.target.identity.files_sha256):
            _print(self.console, "made with another tokenizer, as run.json says: the texts may be wrong")
        for response in responses:
            self._print_all(show_response(response))

    def _show_source(self, dataset: DatasetSettings) -> None:
        _print(self.console, f"\n{dataset.name}: the first rows of {dataset.full_source}")
        options = to_prepare_options(self.parameters, dataset)
        is_trajectory = dataset.kind == "trajectory"
        show = self.previewer.show_trajectory if is_trajectory else self.previewer.show_prompt
        rejected, read, shown = [], 0, 0
        seen: set[int] = set()
        source = resolve_source(dataset.full_source, base=Path.cwd())
        for row in islice(adapt_rows(source, options), max(self.rules.rows, SAMPLE_ROWS)):
            read += 1
            if isinstance(row, Rejected):
                rejected.append(row)
                continue
            content = hash_content(row, exact_json.dumps(row.messages))
            if content in seen:
                continue
            seen.add(content)
            self._print_all(show(row))
            shown += 1
            if shown == self.rules.rows:
                break
        self._print_left_out(dataset, rejected, read=read, duplicates=read - shown - len(rejected))

    def _print_left_out(
        self, dataset: DatasetSettings, rejected: list[Rejected], *, read: int, duplicates: int
    ) -> None:
        parts = [f"rows read: {read:,}"]
        parts += [f"duplicates, which a run drops too: {duplicates:,}"] if duplicates else []
        parts.append(f"rejected by the adapter {dataset.adapter!r}: {len(rejected) or 'none'}")
        _print(self.console, "\n" + ", ".join(parts))
        for row in rejected:
            _print(self.console, f"  {spell_out(say_rejected(row))}")

    def _print_all(self, shown: list[Shown]) -> None:
        view = TokenView(self.target.tokenizer, self.previewer.renderer.decode, whole=self.rules.whole)
        for one in shown:
            self.console.print()
            self.console.print(view.to_text(one), soft_wrap=True)


def _name_tokenizer(parameters: RunParameters) -> str | None:
    """The tokenizer of the run; None where only the server knows."""
    model, tokenizer = name_model(parameters)
    return tokenizer or model


def _load_target(parameters: RunParameters, name: str | None) -> tuple[TargetTokenizer, int | None]:
    """The tokenizer, and the context as far as it is known without a server that need not run."""
    target, server = parameters.target, parameters.server
    if name is None:
        rules = to_warm_up_rules(parameters, server.base_urls)
        timeout_s = min(_LONGEST_WAIT_S, server.ready_timeout_s)
        return asyncio.run(load_served_target(replace(rules, ready_timeout_s=timeout_s)))
    loaded = load_tokenizer(name, revision=target.revision, trust_remote_code=target.trust_remote_code)
    lengths = [loaded.context_length, server.context_length if server.mode == "embedded" else None]
    return loaded, min((length for length in lengths if length is not None), default=None)


def _read_responses(path: Path, limit: int) -> Iterator[Response]:
    for end, line in islice(read_lines(path), limit):
        yield parse_line(Response.from_line, line, path, end)


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
