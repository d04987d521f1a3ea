"""The choices that parameters offer, and how a wrong one in the catalog is named."""

import pytest

from flows.catalog import InputError, complete_parameters
from flows.parameters import DatasetSettings, RunParameters
from tasks.core.adapters import ADAPTERS


def test_the_adapters_to_choose_from_are_those_that_there_are():
    """In the form's list, and in the sentence that --help-parameters prints."""
    field = DatasetSettings.model_json_schema()["properties"]["adapter"]
    assert field["enum"] == sorted(ADAPTERS)
    assert all(name in field["description"] for name in ADAPTERS)


def test_a_wrong_adapter_in_the_catalog_is_named_with_its_dataset(tmp_path):
    """One line: the file, the dataset, the choices and the value."""
    catalog = tmp_path / "datasets.toml"
    catalog.write_text('[mine]\nsource = "a.jsonl"\nadapter = "mesages"\n')
    with pytest.raises(InputError) as refused:
        complete_parameters(RunParameters(datasets=["mine"]), catalog=catalog)
    assert str(refused.value) == (
        f"catalog {catalog}: dataset 'mine': adapter: Input should be 'glaive', 'messages', "
        "'opencodeinstruct' or 'ultrachat' (it is 'mesages')"
    )
