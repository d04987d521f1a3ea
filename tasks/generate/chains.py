"""Conversations that the target answers turn by turn, each on its own answers before (turns: each).

Knows which turn may be asked next and on what history; does not know servers. Invariants: a turn is asked
only after the one before has an answer that may stand in a history; where it has none, no later turn of the
conversation is asked, and each is rejected with the reason.
"""

import numpy as np

from tasks.prepare.adapters.common import drop_thoughts
from tasks.records.response_log import RESPONSES, ResponseLog, parse_line, read_lines
from tasks.records.rows import Rejected, Response
from tasks.records.skim import skim_row

NO_HISTORY = "no_history"

History = tuple[str, ...]


def to_history(text: str, finish_reason: str) -> str | None:
    """The answer as a later turn's history shows it, without its thoughts; None where it may not stand there.

    An answer that was cut is no turn of a conversation, nor is one that is nothing but a thought.
    """
    answer = drop_thoughts(text)
    return answer if finish_reason == "stop" and answer.strip() else None


def find_followers(log: ResponseLog, position: int) -> list[int]:
    """The open positions of the later turns that build on this one."""
    follows, end = log.prompts.follows, position + 1
    while end < len(follows) and follows[end]:
        end += 1
    return [at for at in range(position + 1, end) if log.progress.is_open(at)]


def reject_followers(log: ResponseLog, position: int, why: str) -> int:
    """Say of each open turn after this one that it cannot be asked; returns how many there were."""
    followers = find_followers(log, position)
    for follower in followers:
        prompt = log.prompts.read(follower)
        detail = f"turn {prompt.turn} builds on turn {prompt.turn - follower + position}, which {why}"
        rejected = Rejected(prompt.id, NO_HISTORY, detail, permanent=True, stage="generate", turn=prompt.turn)
        log.reject(rejected, position=follower)
    return len(followers)


def resume_chains(log: ResponseLog) -> dict[int, History]:
    """The histories of the conversations that stopped between two turns, by the position of the next turn.

    Reads the response log once more where there are any, and holds the answers of those conversations.
    Rejects what a crash kept from being rejected.
    """
    prompts, is_open = log.prompts, log.progress.open_flags()
    waiting = np.flatnonzero(prompts.follows[1:] & is_open[1:] & (1 - is_open[:-1])) + 1
    chains = {at: range(at - prompts.read(at).turn, at) for at in waiting.tolist()}
    answers = _read_answers(log, {before for chain in chains.values() for before in chain})
    histories = {}
    for position, chain in chains.items():
        history = tuple(text for at in chain if (text := answers.get(at)) is not None)
        if len(history) == len(chain):
            histories[position] = history
        else:
            broken = next(at for at in chain if answers.get(at) is None)
            reject_followers(log, broken, "has no answer that a history can show")
    return histories


def _read_answers(log: ResponseLog, wanted: set[int]) -> dict[int, str | None]:
    if not wanted:
        return {}
    path, found = log.folder / RESPONSES, {}
    for end, line in read_lines(path):
        response = parse_line(_skim_response, line, path, end)
        position = log.prompts.find(response.id, response.turn)
        if position in wanted:
            found[position] = to_history(response.text, response.finish_reason)
    return found


def _skim_response(line: bytes) -> Response:
    return Response.from_row(skim_row(line))
