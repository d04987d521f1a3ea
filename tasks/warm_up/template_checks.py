"""Whether the chat template takes what the datasets hand it: their tools and their arguments.

Knows what was found out of the template and of the first rows; renders nothing. Invariant: as in
`preflight`, a finding is one line that names the object, the value and, where there is one, the change.
"""

from collections.abc import Collection, Iterator, Sequence

from tasks.tokens.template_names import TemplateNames
from tasks.warm_up.preflight import Finding, SampledDataset


def check_tools(datasets: Sequence[SampledDataset]) -> Iterator[Finding]:
    """Tools that the template ignores; of finished conversations they are a reason to reject them."""
    if names := [one.name for one in datasets if one.hides_tools and one.is_generated]:
        yield Finding(
            "warning",
            f"the chat template ignores tools, which {_quote(names)} has: they are put into the system "
            "prompt as text",
        )


def check_tool_calls(datasets: Sequence[SampledDataset]) -> Iterator[Finding]:
    """Histories with tool calls that the template cannot show: the model would see another model's format."""
    if names := [one.name for one in datasets if one.loses_calls]:
        yield Finding(
            "refusal",
            f"the chat template shows no tool calls, which the prompts of {_quote(names)} have; take the "
            "template of a model that calls tools, or leave these datasets out, or set "
            "target.tool_calls_as_text: true to have calls written as text, not in a form of the model's own",
        )


def check_refused(datasets: Sequence[SampledDataset]) -> Iterator[Finding]:
    """First prompts that cannot be rendered, be it some or all; one problem is enough of a dataset."""
    for one in datasets:
        if one.refused and one.problem is None and not one.loses_calls:
            what = "prompts" if one.is_generated else "conversations"
            yield Finding(
                "warning",
                f"dataset {one.name!r}: {one.refused} of the first {one.refused + len(one.prompt_tokens)} "
                f"{what} would be rejected ({one.refusal})",
            )


def check_template_kwargs(
    template: TemplateNames, datasets: Sequence[SampledDataset], *, begun: Collection[str]
) -> Iterator[Finding]:
    """Arguments that the chat template never reads: it says nothing, and misspelt ones change nothing.

    A dataset that has rows, is `begun`, is only warned of: it was rendered that way, and can be gone on with.
    """
    never = "the chat template never reads" if template.is_sure else "nothing is known to read"
    never += f" (it reads {', '.join(sorted(template.names))})" if template.names else ""
    for one in datasets:
        if unread := template.find_unread(one.own_kwargs):
            yield Finding(
                "refusal" if template.is_sure and one.name not in begun else "warning",
                f"dataset {one.name!r}: chat_template_kwargs has {_quote(unread)}, which {never}; "
                "correct the name, or leave it out",
            )
        if unread := [name for name in template.find_unread(one.rows_kwargs) if name not in one.own_kwargs]:
            yield Finding(
                "warning",
                f"dataset {one.name!r}: its rows' chat_template_kwargs have {_quote(unread)}, which {never}",
            )


def _quote(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
