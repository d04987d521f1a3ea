"""From names and files to checked parameters: the parameter file, the catalog, the sources.

Knows where inputs live on disk; does not know Prefect or servers. Invariant: what it returns is complete
(every dataset spelled out, every path absolute) and was checked without starting anything.
"""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flows.parameters import DatasetSettings, Export, RunParameters
from tasks.export.contamination import EvalSetError, describe_files
from tasks.prepare.sources import SourceError, make_absolute, resolve_source

CATALOG = Path(__file__).resolve().parent.parent / "datasets.toml"


class InputError(ValueError):
    """The input of a run is wrong; says which part, its value and what to do. Nothing was started."""


def read_param_file(path: Path) -> dict[str, Any]:
    """The raw parameters of a YAML or JSON file, its dataset sources made absolute.

    Raises:
        InputError: no such file, or not a mapping.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"parameter file {str(path)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"parameter file {str(path)!r} cannot be read: {exc}") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"parameter file {str(path)!r} is neither YAML nor JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise InputError(f"parameter file {str(path)!r} must hold a mapping of parameters to values")
    for dataset in _spelled_out(data):
        if isinstance(dataset.get("source"), str):
            dataset["source"] = make_absolute(dataset["source"], base=path.resolve().parent)
    export = data.get("export")
    if isinstance(export, dict) and isinstance(export.get("decontaminate"), list):
        export["decontaminate"] = [
            make_absolute(one, base=path.resolve().parent) if isinstance(one, str) else one
            for one in export["decontaminate"]
        ]
    return data


def _spelled_out(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The raw datasets that are mappings; whatever else is there is for validation to refuse."""
    datasets = raw.get("datasets")
    return [one for one in datasets if isinstance(one, dict)] if isinstance(datasets, list) else []


def override_parameters(
    raw: dict[str, Any],
    overrides: Mapping[str, Any],
    *,
    server: Mapping[str, Any],
    only: list[str] | None,
    catalog: Path = CATALOG,
) -> dict[str, Any]:
    """Raw parameters with flags put over them; a value of None is a flag that was not given.

    A budget given as a flag holds for every dataset. `only` picks datasets, of the file or the catalog.

    Raises:
        InputError: `only` has a name that neither of them has.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    merged = {**raw, **given}
    section = {name: value for name, value in server.items() if value is not None}
    if section and isinstance(merged.get("server") or {}, dict):
        merged["server"] = {**(merged.get("server") or {}), **section}
    spelled_out = _spelled_out(merged)
    if "max_tokens_per_dataset" in given:
        for dataset in spelled_out:
            dataset.pop("budget_tokens", None)
    if only:
        by_name = {str(dataset.get("name")): dataset for dataset in spelled_out}
        for name in only:
            if name not in by_name:
                _check_known(name, catalog, _read_catalog(catalog), in_file=by_name)
        merged["datasets"] = [by_name.get(name, name) for name in dict.fromkeys(only)]
    return merged


def build_parameters(raw: Mapping[str, Any]) -> RunParameters:
    """Validate raw parameters.

    Raises:
        InputError: one line per wrong field, with its value.
    """
    try:
        return RunParameters.model_validate(raw)
    except ValidationError as exc:
        raise InputError(_explain(exc, raw.get("datasets"))) from exc


def complete_parameters(parameters: RunParameters, *, catalog: Path = CATALOG) -> RunParameters:
    """Replace catalog names by their datasets and check every source and evaluation set.

    Raises:
        InputError: an unknown name, a missing source or evaluation set.
    """
    known = _read_catalog(catalog)
    datasets: list[str | DatasetSettings] = []
    for entry in parameters.datasets:
        if isinstance(entry, str):
            _check_known(entry, catalog, known)
        datasets.append(known[entry] if isinstance(entry, str) else _absolute(entry, Path.cwd()))
    for entry, dataset in zip(parameters.datasets, datasets, strict=True):
        if isinstance(dataset, DatasetSettings):
            _check_dataset(dataset, catalog if isinstance(entry, str) else None)
    return parameters.model_copy(update={"datasets": datasets, "export": _complete_export(parameters.export)})


def _complete_export(export: Export) -> Export:
    """With absolute paths: an export is repeated from run.json, in whatever folder."""
    paths = [make_absolute(path, base=Path.cwd()) for path in export.decontaminate]
    try:
        describe_files([Path(path) for path in paths])
    except EvalSetError as exc:
        raise InputError(f"export.{exc}") from exc
    return export.model_copy(update={"decontaminate": paths})


def list_datasets(parameters: RunParameters) -> list[DatasetSettings]:
    """The datasets of completed parameters."""
    return [dataset for dataset in parameters.datasets if isinstance(dataset, DatasetSettings)]


def _check_known(name: str, catalog: Path, known: Collection[str], *, in_file: Collection[str] = ()) -> None:
    if name in known:
        return
    places = [f"the parameter file ({', '.join(in_file)})"] if in_file else []
    places.append(f"the catalog {catalog} ({', '.join(known)})")
    raise InputError(
        f"dataset {name!r} is not in {' or '.join(places)}; correct the name or spell the dataset out"
    )


def _read_catalog(path: Path) -> dict[str, DatasetSettings]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return {name: _read_entry(name, settings, path) for name, settings in data.items()}
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, TypeError) as exc:
        raise InputError(f"catalog {path} cannot be read: {exc}") from exc


def _read_entry(name: str, settings: dict[str, Any], catalog: Path) -> DatasetSettings:
    try:
        return _absolute(DatasetSettings(name=name, **settings), catalog.parent)
    except ValidationError as exc:
        raise InputError(f"catalog {catalog}: dataset {name!r}: {_explain(exc)}") from exc


def _absolute(dataset: DatasetSettings, base: Path) -> DatasetSettings:
    return dataset.model_copy(update={"source": make_absolute(dataset.source, base=base)})


def _check_dataset(dataset: DatasetSettings, catalog: Path | None) -> None:
    try:
        resolve_source(dataset.full_source, base=Path.cwd())
    except (SourceError, ValueError) as exc:
        place = f" of the catalog {catalog}" if catalog else ""  # that is where its source can be changed
        raise InputError(f"dataset {dataset.name!r}{place}: {exc}") from exc


def _explain(exc: ValidationError, datasets: object = None) -> str:
    """A line per wrong field; in one of these raw datasets it is named by that, if it has a name."""
    names: dict[int | str, str] = {
        place: dataset["name"]
        for place, dataset in enumerate(datasets if isinstance(datasets, list) else [])
        if isinstance(dataset, dict) and isinstance(dataset.get("name"), str)
    }
    errors = exc.errors(include_url=False)
    lines = [_explain_one(error, names) for error in errors if not _is_other_way(error)]
    return "\n".join(dict.fromkeys(lines))


def _is_other_way(error: ErrorDetails) -> bool:
    """Whether it only says that a mapping among the datasets is no name, or a name no mapping."""
    if _is_no_name(error):
        return isinstance(error["input"], dict)
    return error["type"] == "model_type" and _is_model(error["loc"][-1])


def _is_model(part: int | str) -> bool:
    """Whether a part of a location is the model in `str | DatasetSettings`, validators around it or not."""
    return "DatasetSettings" in str(part)


def _is_no_name(error: ErrorDetails) -> bool:
    """Whether it comes from the `str` in `str | DatasetSettings`, which pydantic puts into the location."""
    return error["type"] == "string_type" and error["loc"][-1] == "str"


def _explain_one(error: ErrorDetails, names: Mapping[int | str, str]) -> str:
    where = _locate(error["loc"], names)
    if error["type"] == "extra_forbidden":
        near = _find_near(error["loc"])
        return f"{where}: unknown parameter{near}; check its spelling with draftmill run --help-parameters"
    if error["type"] == "missing":
        return f"{where}: missing"
    if error["type"] == "value_error":  # our own sentence, which names the value where it may
        return f"{where}: {error['msg'].removeprefix('Value error, ')}"
    wanted = error["msg"]
    if _is_no_name(error):
        where = where.removesuffix(".str")
        wanted = "Input should be a name from the catalog or a mapping with name, source and adapter"
    return f"{where}: {wanted} (it is {error['input']!r})"


def _find_near(loc: tuple[int | str, ...]) -> str:
    """The parameter that a misspelt one may stand for, of a dataset where it is a dataset's."""
    models: list[type[BaseModel]] = [DatasetSettings]
    if not any(map(_is_model, loc)):
        models += [RunParameters, *_list_sections(RunParameters)]
    near = get_close_matches(str(loc[-1]), [name for model in models for name in model.model_fields], n=1)
    return f" (perhaps {near[0]!r})" if near else ""


def _list_sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for field in model.model_fields.values():
        if isinstance(field.default, BaseModel):
            yield type(field.default)
            yield from _list_sections(type(field.default))


def _locate(loc: tuple[int | str, ...], names: Mapping[int | str, str]) -> str:
    parts = [str(part) for part in loc if not _is_model(part)]
    if loc[:1] == ("datasets",) and len(parts) > 2 and parts[2] != "name" and loc[1] in names:
        return f"dataset {names[loc[1]]!r}: {'.'.join(parts[2:])}"
    return ".".join(parts) or "parameters"
