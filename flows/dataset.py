"""One dataset: prepare its prompts, generate its responses."""

from pathlib import Path

from prefect import flow

from flows.opening import to_generation_rules, to_prepare_request
from flows.parameters import DatasetSettings, RunParameters
from tasks.generate import generate_responses
from tasks.generation import GenerationResult
from tasks.prepare import prepare_prompts
from tasks.session import get_session


@flow(name="generate-dataset", flow_run_name="generate-{dataset.name}", persist_result=False)
async def generate_dataset(parameters: RunParameters, dataset: DatasetSettings) -> GenerationResult:
    """Bring one dataset to its budget on the servers of the run around it."""
    await prepare_prompts(to_prepare_request(parameters, dataset, get_session()))
    generate = generate_responses.with_options(
        retries=parameters.dataset_retries, retry_delay_seconds=parameters.dataset_retry_delay_s
    )
    return await generate(Path(parameters.output_dir), to_generation_rules(parameters, dataset))
