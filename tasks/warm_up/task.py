"""The task that checks the servers before the first prompt, and shows the plan.

Knows Prefect's side of it; the work is done in `open_session`.
"""

import logging
from collections.abc import Sequence

from prefect import task
from prefect.artifacts import TableArtifact
from prefect.cache_policies import NO_CACHE

from tasks.artifacts import create_artifact, run_artifact_key
from tasks.generate.session import Session
from tasks.warm_up.open_session import CountRows, WarmUpRules, open_session
from tasks.warm_up.preflight import Finding, PreflightError, Report

logger = logging.getLogger(__name__)


@task(name="warm-up-server", cache_policy=NO_CACHE, persist_result=False)
async def warm_up_server(rules: WarmUpRules, count_rows: CountRows) -> tuple[Session, Report]:
    """Wait for the servers, check them, show the plan, and open the session that the datasets share.

    `count_rows` says what the datasets have on disk.
    """
    try:
        session, report = await open_session(rules, count_rows=count_rows)
    except PreflightError as exc:
        _log(exc.findings)
        raise
    _log(report.findings)
    plan = report.plan
    logger.info(
        "ready: %s %s, vocabulary %d, context %s",
        session.model, f"at {', '.join(rules.base_urls)}" if rules.base_urls else "without a server",
        session.target.vocab_size, session.resources.context_length,
    )  # fmt: skip
    logger.info(plan.to_line())
    if rules.turns_folder is None:  # else the plan is one dataset's, and the run around it shows its own
        await create_artifact(
            TableArtifact(
                table=plan.to_rows(),
                key=run_artifact_key(rules.output_dir, "plan"),
                description=f"The plan of {rules.output_dir.resolve()}: {plan.to_line()}",
            )
        )
    return session, report


def _log(findings: Sequence[Finding]) -> None:
    """What a person should know of; refusals are in the error, which is logged by itself."""
    for one in findings:
        if one.level in ("warning", "problem"):
            logger.warning(one.text)
