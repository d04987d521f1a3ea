"""One dataset: prepare its prompts, generate its responses."""

import functools
from pathlib import Path

from prefect import flow

from flows.catalog import complete_parameters, list_datasets
from flows.finished import find_finished
from flows.logs import show_our_logs
from flows.opening import join_run, to_generation_rules, to_prepare_request
from flows.parameters import DatasetSettings, RunParameters
from flows.patience import wait_until_prefect_acknowledges
from tasks.generate.generation import GenerationResult
from tasks.generate.session import find_session
from tasks.generate.task import generate_responses
from tasks.prepare.measure_lengths import find_lengths
from tasks.prepare.task import prepare_prompts
from tasks.records.run_file import check_run_folder


@flow(name="generate-dataset", flow_run_name="generate-{dataset.name}", persist_result=False)
async def generate_dataset(parameters: RunParameters, dataset: DatasetSettings) -> GenerationResult:
    """Bring one dataset to its budget: as part of a run around it, or by itself."""
    show_our_logs()
    place = find_place(parameters, dataset)
    parameters = parameters.model_copy(update={"datasets": [dataset]})
    [dataset] = list_datasets(complete_parameters(parameters))
    async with wait_until_prefect_acknowledges():
        if find_session() is None:  # run by itself
            check_run_folder(Path(parameters.output_dir))
            if found := await find_finished(parameters, [dataset]):
                return found[dataset.name]
        return await _generate(parameters, dataset, place)


def find_place(parameters: RunParameters, dataset: DatasetSettings) -> int:
    """Where the dataset stands among those of the run; at the end when it is none of them."""
    names = [one if isinstance(one, str) else one.name for one in parameters.datasets]
    return names.index(dataset.name) if dataset.name in names else len(names)


async def _generate(parameters: RunParameters, dataset: DatasetSettings, place: int) -> GenerationResult:
    async with join_run(parameters, place=place) as session:
        resources = session.resources
        await prepare_prompts(
            to_prepare_request(parameters, dataset, session.fingerprint),
            functools.partial(
                find_lengths,
                target=session.target,
                renderer=resources.renderer,
                context_length=resources.context_length,
            ),
        )
        generate = generate_responses.with_options(
            retries=parameters.dataset_retries, retry_delay_seconds=parameters.dataset_retry_delay_s
        )
        return await generate(Path(parameters.output_dir), to_generation_rules(parameters, dataset))
