"""The choices that parameters offer, and how a wrong one in the catalog is named."""

import tomllib

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from flows.catalog import CATALOG, InputError, build_parameters, complete_parameters, list_datasets
from flows.parameters import DatasetSettings, Export, RunParameters, Server
from tasks.export.export_run import FORMATS
from tasks.prepare.adapters import ADAPTERS
from tasks.prepare.sources import SourceError


@pytest.mark.parametrize(
    ("server", "unused"),
    [
        ({}, []),
        ({"mode": "connect", "profile": "cpu", "launch_flags": {"x": 1}}, ["profile", "launch_flags"]),
        ({"mode": "connect", "port": 30000, "slots": 4}, ["slots"]),
        ({"mode": "launch", "profile": "cpu", "python": "p", "port": 1}, []),
        ({"mode": "launch", "profile": "cpu", "base_urls": ["http://a"]}, ["base_urls"]),
        ({"mode": "embedded", "slots": 4, "profile": "cpu"}, ["profile"]),
    ],
)
def test_what_is_for_another_mode_of_the_server_is_found(server, unused):
    """A default that is spelled out, as a form does, is no matter."""
    assert Server(**server).find_unused() == unused


def test_the_adapters_to_choose_from_are_those_that_there_are():
    """In the form's list, and in the sentence that --help-parameters prints."""
    field = DatasetSettings.model_json_schema()["properties"]["adapter"]
    assert field["enum"] == sorted(ADAPTERS)
    assert all(name in field["description"] for name in ADAPTERS)


def test_the_export_formats_to_choose_from_are_those_that_there_are():
    """In the form's list, and in the sentence that --help-parameters prints."""
    field = Export.model_json_schema()["properties"]["formats"]
    assert tuple(field["items"]["enum"]) == FORMATS
    assert all(f"{name}: " in field["description"] for name in FORMATS)


def test_a_wrong_adapter_in_the_catalog_is_named_with_its_dataset(tmp_path):
    """One line: the file, the dataset, the choices and the value."""
    catalog = tmp_path / "datasets.toml"
    catalog.write_text('[mine]\nsource = "a.jsonl"\nadapter = "mesages"\n')
    with pytest.raises(InputError) as refused:
        complete_parameters(RunParameters(datasets=["mine"]), catalog=catalog)
    message = str(refused.value)
    assert message.startswith(f"catalog {catalog}: dataset 'mine': adapter: Input should be 'glaive', ")
    assert message.endswith("'text' or 'ultrachat' (it is 'mesages')")


def is_taken(section, value):
    """Whether the form's schema takes it, as Prefect's server checks it."""
    return Draft202012Validator(section.model_json_schema()).is_valid(value)


@pytest.mark.parametrize("value", ["", "32k", True, False, None, 4, 0.9])
def test_launch_flags_are_taken_as_yaml_has_them(value):
    """By the form's schema and by the model, with their types kept."""
    flags = {"launch_flags": {"x": value}}
    kept = Server.model_validate(flags).launch_flags["x"]
    assert (kept, type(kept)) == (value, type(value))
    assert is_taken(Server, flags)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}])
def test_a_launch_flag_of_another_shape_is_one_line(value):
    """With its name, its value and what to write."""
    with pytest.raises(InputError) as refused:
        build_parameters({"datasets": ["a"], "server": {"launch_flags": {"bs": value}}})
    assert str(refused.value).startswith(f"server.launch_flags: 'bs' is {value!r}; write a text, a number, ")
    assert not is_taken(Server, {"launch_flags": {"bs": value}})


DATASET = {"source": "a.jsonl", "adapter": "messages"}


@pytest.mark.parametrize("name", ["export", "run.json", "stats.parquet", "server.log", "turn-0.lock"])
def test_a_dataset_named_as_a_file_of_ours_is_refused(name):
    """By the form's schema, and with a sentence by the model, capitals aside."""
    assert is_taken(DatasetSettings, {"name": f"{name}-1", **DATASET})
    assert not is_taken(DatasetSettings, {"name": name, **DATASET})
    for written in (name, name.upper()):
        with pytest.raises(InputError, match=rf"datasets\.0\.name: .* named '{written}': .* '{written}-1'"):
            build_parameters({"datasets": [{"name": written, **DATASET}]})


def test_a_url_without_http_is_refused():
    """By the form's schema, and with a sentence by the model."""
    assert is_taken(Server, {"base_urls": ["http://h:1", "https://h"]})
    assert not is_taken(Server, {"base_urls": ["h:1"]})
    with pytest.raises(InputError) as refused:
        build_parameters({"datasets": ["a"], "server": {"base_urls": ["http://h", "h:1"]}})
    said = "'h:1' does not start with http:// or https://; write http://HOST:PORT"
    assert str(refused.value) == f"server.base_urls: {said}"


def test_two_datasets_of_one_name_are_refused():
    """Capitals aside, and from the catalog too."""
    with pytest.raises(InputError, match=r"^datasets: A, a, a would share a folder; give each"):
        build_parameters({"datasets": ["a", "b", {"name": "A", **DATASET}, {"name": "a", **DATASET}]})


def test_a_hub_source_is_taken_as_it_is_and_asked_for_with_its_settings(monkeypatch, tmp_path):
    """No folder is put before it; what the Hub refuses is named with the dataset."""
    asked = []
    monkeypatch.setattr("tasks.prepare.sources.find_dataset", asked.append)
    catalog = tmp_path / "datasets.toml"
    catalog.write_text('[mine]\nsource = "hub:org/name"\nadapter = "messages"\nsplit = "test"\n')
    for _ in range(2):  # the command does it, and the flow again
        (dataset,) = complete_parameters(RunParameters(datasets=["mine"]), catalog=catalog).datasets
        assert dataset.source == "hub:org/name"
        complete_parameters(RunParameters(datasets=[dataset]), catalog=catalog)
    assert asked == ["hub:org/name?split=test"] * 4

    def refuse(source):
        raise SourceError(f"source {source!r}: away")

    monkeypatch.setattr("tasks.prepare.sources.find_dataset", refuse)
    refused = r"source 'hub:org/name\?split=test': away$"
    with pytest.raises(InputError, match=rf"^dataset 'mine' of the catalog .*datasets\.toml: {refused}"):
        complete_parameters(RunParameters(datasets=["mine"]), catalog=catalog)
    with pytest.raises(InputError, match=rf"^dataset 'mine': {refused}"):
        complete_parameters(RunParameters(datasets=[dataset]), catalog=catalog)


def test_the_catalog_has_the_ten_datasets(monkeypatch):
    """Each with settings that are valid; every public set is read from the Hub."""
    monkeypatch.setattr("flows.catalog.resolve_source", lambda source, *, base: [])
    names = [*tomllib.loads(CATALOG.read_text())]
    datasets = list_datasets(complete_parameters(RunParameters(datasets=[*names])))
    assert [name.partition("_")[0] for name in names] == ["A1", "A2", *(f"B{n}" for n in range(1, 9))]
    assert [dataset.name for dataset in datasets if dataset.kind == "trajectory"] == names[:2]
    assert {dataset.name: dataset.turns for dataset in datasets if dataset.turns != "last"} == {
        "B1_glaive": "independent",
        "B6_ultrachat": "each",
        "B7_sharegpt": "each",
        "B8_sweagent": "independent",
    }
    local = [dataset.name for dataset in datasets if not dataset.source.startswith("hub:")]
    assert local == ["A2_kimik25", "B7_sharegpt"]


def test_hub_settings_are_refused_for_files():
    """They would be ignored."""
    with pytest.raises(ValidationError, match=r"split is for a source on the Hub .* not for 'a\.jsonl'"):
        DatasetSettings(name="mine", source="a.jsonl", adapter="messages", split="train")


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "tools", "chat_template"])
def test_what_is_not_the_templates_is_refused_as_its_argument(name):
    """It would be refused with each prompt, or render another template."""
    dataset = {"name": "mine", **DATASET, "chat_template_kwargs": {name: True}}
    with pytest.raises(InputError, match=rf"kwargs: '{name}' is not the template's"):
        build_parameters({"datasets": [dataset]})
