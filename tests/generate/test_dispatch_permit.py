"""Datasets send in order, so many at once, and hand their turn on early."""

import asyncio
import multiprocessing
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.generate.dispatch_permit import LOOK_EVERY_S, DispatchPermit, ProcessDispatchPermit


async def settle():
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


class Crew:
    """Tasks that hold a turn until they are told to end."""

    def __init__(self, at_once):
        self.turn = DispatchPermit(at_once)
        self.started, self.holding = [], set()
        self.give_up, self.ends, self.tasks = {}, {}, {}

    def start(self, name):
        """Let a dataset ask for its turn."""
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._hold(name))

    async def _hold(self, name):
        async with self.turn.hold(name) as give_up:
            self.started.append(name)
            self.holding.add(name)
            self.give_up[name] = give_up
            try:
                await self.ends[name].wait()
            finally:
                self.holding.discard(name)


def run_crew(at_once, body):
    async def run():
        crew = Crew(at_once)
        await body(crew)
        for task in crew.tasks.values():
            task.cancel()
        await asyncio.gather(*crew.tasks.values(), return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_turns_are_taken_in_the_order_of_asking(at_once):
    """Only at_once hold a turn; each end lets the next one in."""

    async def body(crew):
        for name in "abcde":
            crew.start(name)
        await settle()
        assert crew.started == list("abcde"[:at_once])
        for done, name in enumerate("abcde", 1):
            crew.ends[name].set()
            await settle()
            assert crew.started == list("abcde"[: at_once + done])

    run_crew(at_once, body)


def test_giving_up_lets_one_other_in_and_only_once():
    """The turn is handed on while the block still runs; neither a second call nor the end frees another."""

    async def body(crew):
        for name in "abc":
            crew.start(name)
        await settle()
        crew.give_up["a"]()
        crew.give_up["a"]()
        await settle()
        assert crew.started == ["a", "b"]
        crew.ends["a"].set()
        await settle()
        assert crew.started == ["a", "b"]
        crew.ends["b"].set()
        await settle()
        assert crew.started == ["a", "b", "c"]

    run_crew(1, body)


@pytest.mark.parametrize("early", [False, True])
def test_an_exception_releases_the_turn_once(early):
    """A dataset that fails, drained or not, frees exactly one turn."""

    async def fail(turn):
        async with turn.hold("failing") as give_up:
            if early:
                give_up()
            raise ZeroDivisionError

    async def body(crew):
        with pytest.raises(ZeroDivisionError):
            await fail(crew.turn)
        for name in "ab":
            crew.start(name)
        await settle()
        assert crew.started == ["a"]

    run_crew(1, body)


def test_a_cancelled_waiter_leaves_the_queue():
    """It neither takes a turn later nor blocks those behind it."""

    async def body(crew):
        for name in "abc":
            crew.start(name)
        await settle()
        crew.tasks["b"].cancel()
        await settle()
        crew.ends["a"].set()
        await settle()
        assert crew.started == ["a", "c"]

    run_crew(1, body)


def test_whoever_waits_for_the_queue_learns_of_it_before_the_turn_comes():
    """A dataset counts as queued when it asks, while another one still has the turn."""

    async def body(crew):
        crew.start("a")
        await settle()
        waiting = asyncio.create_task(crew.turn.wait_queued("b"))
        await settle()
        assert not waiting.done()
        crew.start("b")
        await settle()
        assert waiting.done()
        assert crew.started == ["a"]
        await asyncio.wait_for(crew.turn.wait_queued("a"), timeout=5)

    run_crew(1, body)


@given(
    at_once=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from(["give_up", "end", "cancel"]), st.integers(0, 5)), max_size=12),
)
def test_never_more_than_at_once_hold_a_turn_and_none_is_lost(at_once, moves):
    """Whatever order datasets drain, end or are cancelled in, the turns that are free are in use."""

    async def body(crew):
        names, gave_up = "abcdef", set()
        for name in names:
            crew.start(name)
        await settle()
        for move, index in moves:
            name = names[index]
            if move == "give_up" and name in crew.holding:
                crew.give_up[name]()
                gave_up.add(name)
            elif move == "end":
                crew.ends[name].set()
            elif move == "cancel":
                crew.tasks[name].cancel()
            await settle()
            waiting = [n for n in names if not crew.tasks[n].done() and n not in crew.holding]
            with_turn = crew.holding - gave_up
            assert len(with_turn) <= at_once
            assert not waiting or len(with_turn) == at_once

    run_crew(at_once, body)


def hold_in_a_process(folder, at_once, name, place):
    """Take a turn, say so in a file, hold it until it is killed."""

    async def hold():
        async with ProcessDispatchPermit(folder, at_once, place).hold(name):
            (folder / name).touch()
            await asyncio.Event().wait()

    asyncio.run(hold())


@pytest.fixture
def start_process(tmp_path):
    """Start a process that wants a turn."""
    spawn, processes = multiprocessing.get_context("spawn"), []

    def start(name, at_once, place=0):
        process = spawn.Process(target=hold_in_a_process, args=(tmp_path, at_once, name, place))
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.parametrize("at_once", [1, 2])
def test_processes_take_turns_and_a_killed_one_leaves_its(tmp_path, start_process, at_once):
    """Only at_once hold one; kill -9 of a holder lets the next one in."""
    holders = {name: start_process(name, at_once) for name in "ab"[:at_once]}
    wait_until(lambda: all((tmp_path / name).exists() for name in holders))
    start_process("next", at_once)
    time.sleep(3 * LOOK_EVERY_S)
    assert not (tmp_path / "next").exists()
    holders["a"].kill()
    wait_until((tmp_path / "next").exists)


def test_of_waiting_processes_the_first_place_is_next(tmp_path, start_process):
    """Whoever came first; a place that was killed while it waited is passed over."""
    holder = start_process("holder", 1)
    wait_until((tmp_path / "holder").exists)
    waiting = {place: start_process(f"at {place}", 1, place) for place in (3, 2, 1)}
    wait_until(lambda: all((tmp_path / f"turn-wait-{place}.lock").exists() for place in waiting))
    waiting[1].kill()
    waiting[1].join()
    time.sleep(3 * LOOK_EVERY_S)
    holder.kill()
    wait_until((tmp_path / "at 2").exists)
    time.sleep(3 * LOOK_EVERY_S)
    assert not (tmp_path / "at 3").exists()
    waiting[2].kill()
    wait_until((tmp_path / "at 3").exists)


def test_a_turn_between_processes_is_handed_on_early(tmp_path, start_process):
    """While its holder goes on with what is in flight."""

    async def hold():
        async with ProcessDispatchPermit(tmp_path, 1).hold("first") as give_up:
            start_process("next", 1)
            give_up()
            give_up()
            async with asyncio.timeout(120):
                while not (tmp_path / "next").exists():  # noqa: ASYNC110  another process makes it
                    await asyncio.sleep(0.05)

    asyncio.run(hold())
