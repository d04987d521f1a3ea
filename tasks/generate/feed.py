"""Prompts rendered ahead of need, in dispatch order, lane by lane.

Knows positions, lanes and the renderer; does not know servers or budgets. Invariants: each open prompt
is offered once; however many wait, what is held of them is bounded.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from tasks.generate.chains import History
from tasks.prepare.lane import Lane
from tasks.records.progress import Progress
from tasks.records.prompt_file import PromptFile
from tasks.records.rows import Prompt
from tasks.tokens.rendering import Renderer, RenderError, fit_max_new_tokens

READY_PER_LANE = 128
PARKED_LIMIT = 4096  # prompts read past because their lane had enough; bounds the look-ahead
PARKED_TOKENS = 4_000_000  # of them all: 16 MB
BATCH = 64  # prompts rendered in one go


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt ready to be sent; `input_ids` (prompt_tokens,) as the model will see them.

    `history` are the target's own answers to the turns before, where the prompt shows those.
    """

    position: int
    prompt: Prompt
    input_ids: list[int]
    lane: str
    max_new_tokens: int
    history: History = ()


@dataclass(frozen=True, slots=True)
class Unrenderable:
    """A prompt that cannot be sent, with the reason."""

    position: int
    prompt: Prompt
    error: RenderError


@dataclass(frozen=True, slots=True)
class _Parked:
    """A prompt that waits until its lane wants it; its ids are kept, for to render it again costs as much."""

    position: int
    ids: "array[int]"
    history: History


@dataclass(frozen=True, slots=True)
class _Next:
    """A turn that may be asked, on the answers before it."""

    position: int
    history: History = ()


class Feeder:
    """Keeps up to READY_PER_LANE rendered prompts in each lane.

    Args:
        lanes: "short" and "long"; prompts of long_prompt_tokens or more take the long one.
        on_change: called when prompts became ready or ran out.
        on_unrenderable: told of each prompt that cannot be sent.
        histories: of the conversations that stopped between two turns, by the position of the next turn.
    """

    def __init__(
        self,
        prompts: PromptFile,
        progress: Progress,
        renderer: Renderer,
        *,
        lanes: dict[str, Lane],
        long_prompt_tokens: int,
        context_length: int | None,
        executor: Executor,
        on_change: Callable[[], None],
        on_unrenderable: Callable[[Unrenderable], None],
        histories: Mapping[int, History] | None = None,
    ) -> None:
        self._prompts = prompts
        self._progress = progress
        self._renderer = renderer
        self._lanes = lanes
        self._long_prompt_tokens = long_prompt_tokens
        self._context_length = context_length
        self._executor = executor
        self._on_change = on_change
        self._on_unrenderable = on_unrenderable
        self._next = 0
        self._continued = deque(_Next(*one) for one in sorted((histories or {}).items()))
        self._ready: dict[str, deque[Rendered]] = {name: deque() for name in lanes}
        self._parked: dict[str, deque[_Parked]] = {name: deque() for name in lanes}
        self._parked_tokens = 0
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._rendering = 0

    def continue_with(self, position: int, history: History) -> None:
        """Offer a turn whose turns before it are answered: before new conversations, so that few are open."""
        self._continued.append(_Next(position, history))
        self._wanted.set()

    def peek(self, lane: str) -> bool:
        """Whether a prompt of this lane is ready."""
        return bool(self._ready[lane])

    def take(self, lane: str) -> Rendered:
        """The next prompt of a lane; call `peek` first."""
        item = self._ready[lane].popleft()
        self._wanted.set()
        return item

    @property
    def is_empty(self) -> bool:
        """No prompt is ready and none will be."""
        return (
            self._next >= len(self._prompts)
            and not self._continued
            and not self._rendering
            and not any(self._ready.values())
            and not any(self._parked.values())
        )

    def is_starved(self, lane: str) -> bool:
        """Nothing of this lane is ready, and nothing more will be before the other lanes move on."""
        is_resting = not self._rendering and not self._wanted.is_set()
        return is_resting and not self._ready[lane]

    async def run(self) -> None:
        """Render whatever may be asked; cancel it when nothing more is wanted."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while chosen := self._choose():
                self._rendering = len(chosen)
                batch = await loop.run_in_executor(self._executor, self._make, chosen)
                self._rendering = 0
                for item in batch:
                    self._file(item)
                self._on_change()
            if not all(self._ready.values()):
                self._on_change()

    def _choose(self) -> Sequence[_Next | _Parked]:
        """What to make ready now: turns that go on, parked prompts of a hungry lane, then new positions."""
        if self._continued:
            return [self._continued.popleft() for _ in range(min(BATCH, len(self._continued)))]
        hungry = [name for name, ready in self._ready.items() if len(ready) < READY_PER_LANE]
        for name in hungry:
            if parked := self._parked[name]:
                wanted = [parked.popleft() for _ in range(min(BATCH, len(parked)))]
                self._parked_tokens -= sum(len(one.ids) for one in wanted)
                return wanted
        if not hungry or self._has_enough_parked():
            return []
        chosen = self._progress.find_open(self._next, limit=BATCH, skip=self._prompts.follows)
        self._next = chosen[-1] + 1 if len(chosen) == BATCH else len(self._prompts)
        return [_Next(position) for position in chosen]

    def _has_enough_parked(self) -> bool:
        parked = sum(map(len, self._parked.values()))
        return parked >= PARKED_LIMIT or self._parked_tokens >= PARKED_TOKENS

    def _file(self, item: Rendered | Unrenderable) -> None:
        if isinstance(item, Unrenderable):
            self._on_unrenderable(item)
        elif len(self._ready[item.lane]) < READY_PER_LANE + BATCH:
            (self._ready[item.lane].appendleft if item.history else self._ready[item.lane].append)(item)
        else:
            self._parked[item.lane].append(_Parked(item.position, array("I", item.input_ids), item.history))
            self._parked_tokens += len(item.input_ids)

    def _make(self, chosen: Sequence[_Next | _Parked]) -> list[Rendered | Unrenderable]:
        prompts = [self._prompts.read(one.position).with_history(one.history) for one in chosen]
        known = [one.ids.tolist() for one in chosen if isinstance(one, _Parked)]
        rendered = known or self._renderer.render_all(prompts)
        return [self._fit(*one) for one in zip(chosen, prompts, rendered, strict=True)]

    def _fit(
        self, chosen: _Next | _Parked, prompt: Prompt, ids: list[int] | RenderError
    ) -> Rendered | Unrenderable:
        position = chosen.position
        if isinstance(ids, RenderError):
            return Unrenderable(position, prompt, ids)
        lane = self._lanes["long" if len(ids) >= self._long_prompt_tokens else "short"]
        try:
            fitted = fit_max_new_tokens(
                len(ids), max_new_tokens=lane.max_new_tokens, context_length=self._context_length
            )
        except RenderError as exc:
            return Unrenderable(position, prompt, exc)
        return Rendered(position, prompt, ids, lane.name, fitted, chosen.history)
