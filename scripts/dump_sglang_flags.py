"""Write the table of SGLang's flags that `draftmill serve` checks against: serving/launch/sglang_flags.json.

Run by the interpreter that SGLang is installed in (`make sglang-flags SGLANG_PYTHON=...`), so it imports
nothing but SGLang and the standard library. It reads the real parser's own actions, not its help page. For
another version of SGLang: run it, read the diff, adapt serving/launch/profiles/, run `make test-profiles`.
"""

import argparse
import json
import re
import sys
from typing import Any

# argparse's `type` of a flag, as the word our own checks branch on.
TYPES = {
    None: "str",
    "str": "str",
    "nullable_str": "str",
    "parse_cuda_graph_backend_arg": "str",
    "int": "int",
    "float": "float",
    "human_readable_int": "size",  # 8192, 128k, 64Ki
    "loads": "json",
    "json_list_type": "json",
    "parse_cuda_graph_config_arg": "json",
}


def main() -> None:
    """Print the table as JSON."""
    from sglang.srt.server_args import ServerArgs
    from sglang.version import __version__

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    flags = [_describe(action) for action in parser._actions if action.dest != "help"]
    flags.sort(key=lambda flag: flag["name"])
    lines = ",\n".join(f"  {json.dumps(flag, ensure_ascii=False)}" for flag in flags)
    sys.stdout.write(f'{{"sglang": "{__version__}",\n "flags": [\n{lines}\n]}}\n')


def _describe(action: argparse.Action) -> dict[str, Any]:
    name, *aliases = (option for option in action.option_strings if option.startswith("--"))
    kind = "switch" if action.nargs == 0 else TYPES[getattr(action.type, "__name__", None)]
    found: dict[str, Any] = {"name": name, "aliases": aliases, "type": kind}
    if action.nargs not in (None, 0):
        found["nargs"] = action.nargs
    if action.choices is not None:
        in_order = sorted(action.choices) if isinstance(action.choices, set) else list(action.choices)
        found["choices"] = [str(choice) for choice in in_order]
    if action.required:
        found["required"] = True
    found["default"] = action.default
    found["help"] = _first_sentence(" ".join((action.help or "").split()))
    return found


def _first_sentence(text: str) -> str:
    if text.startswith("Deprecated"):  # the second one says what to use
        return text
    return re.split(r"(?<=[.!?]) (?=[A-Z\"'])", text, maxsplit=1)[0]


if __name__ == "__main__":
    main()
