"""The forward context in tasks, threads and generators, and blocks that are left in another order, or elsewhere."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from ipcreduce import forward_context, get_forward_context


@pytest.fixture(autouse=True)
def outside() -> Iterator[None]:
    assert found() is None
    yield
    assert found() is None, "a context is left set"


def found() -> Any:
    context = get_forward_context()
    return None if context is None else context.batch_descriptor


def test_each_task_has_its_own():
    async def task(name: str) -> list[Any]:
        seen = [found()]
        with forward_context(name):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(found())
            with forward_context(f"within {name}"):
                await asyncio.sleep(0)
                seen.append(found())
            await asyncio.sleep(0)
        return [*seen, found()]

    async def both() -> list[list[Any]]:
        return await asyncio.gather(task("a"), task("b"))

    for name, seen in zip("ab", asyncio.run(both()), strict=True):
        assert seen == [None, name, name, name, f"within {name}", None]


def test_a_task_that_is_created_in_a_block_has_it_until_it_is_left():
    async def steps() -> list[Any]:
        seen = [found()]
        await asyncio.sleep(0)
        return [*seen, found()]

    async def creates() -> Any:
        with forward_context("a"):
            task = asyncio.create_task(steps())
            await asyncio.sleep(0)
            in_thread = await asyncio.to_thread(found)
            await asyncio.sleep(0)  # from Python 3.14 on the thread may have ended before the other task goes on
        return await task, in_thread

    assert asyncio.run(creates()) == (["a", "a"], "a")

    async def left() -> list[Any]:
        with forward_context("a"):
            task = asyncio.create_task(steps())
        return await task

    assert asyncio.run(left()) == [None, None]


def test_each_thread_has_its_own():
    with forward_context("a"):
        seen: list[Any] = []
        thread = threading.Thread(target=contextvars.Context().run, args=(lambda: seen.append(found()),))
        thread.start()
        thread.join()
        assert seen == [None]


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1]])
def test_blocks_that_are_left_in_any_order(order: list[int]):
    blocks = [forward_context(number) for number in range(3)]
    for block in blocks:
        block.__enter__()
    there = {0, 1, 2}
    for number in order:
        assert found() == max(there)
        blocks[number].__exit__(None, None, None)
        there.remove(number)


def test_a_generator_shares_the_context_of_its_caller():
    def steps(name: str) -> Iterator[Any]:
        with forward_context(name):
            yield found()
            yield found()

    one, other = steps("a"), steps("b")
    assert (next(one), found()) == ("a", "a")
    assert (next(other), found(), next(one)) == ("b", "b", "b")
    one.close()
    assert found() == "b"
    with forward_context("c"):
        other.close()
        assert found() == "c"


def test_an_asynchronous_generator_that_is_dropped():
    """The event loop closes it in a task of its own."""

    async def steps() -> AsyncIterator[Any]:
        with forward_context("a"):
            yield found()

    async def drops() -> tuple[Any, Any]:
        with forward_context("b"):
            async for _ in (dropped := steps()):
                break
            del dropped
            gc.collect()
            for _ in range(3):
                await asyncio.sleep(0)
            within = found()
        return within, found()

    assert asyncio.run(drops()) == ("b", None)


def test_a_block_that_is_left_in_another_context():
    block, elsewhere = forward_context("a"), contextvars.Context()
    with forward_context("b"):
        block.__enter__()
        elsewhere.run(block.__exit__, None, None, None)
        assert (found(), elsewhere.run(found)) == ("b", None)


def test_an_exception_in_the_block():
    with pytest.raises(LookupError), forward_context("a"):
        raise LookupError
