import asyncio

from radixkv.service.client import AsyncClient
from radixkv.service.server.calls import add_done_callback
from tests.patience import PATIENCE_S
from tests.reference_cycles import uncollected
from tests.service.fake_engine import FakeEngine
from tests.service.serving import refusal_of, serving


def test_calls_leave_no_reference_cycles():
    engine = FakeEngine()

    async def run():
        async with serving(engine) as (_, address), AsyncClient(address, timeout_s=PATIENCE_S) as client:
            with uncollected() as uncollected_objects:
                await client.prefill([1, 2])
                await client.probe([1, 2])
                for options in ({}, {"n": 3}, {"logprobs": 2}):
                    async for _ in client.generate([1, 2], max_new_tokens=2, **options):
                        pass
                abandoned = client.generate([1, 2], max_new_tokens=100)
                await anext(abandoned)
                await abandoned.aclose()
                await refusal_of(client.prefill([]))
                await refusal_of(client.release("unknown"))
                engine.futures.clear()
                await asyncio.sleep(0.1)
        return {type(each).__name__ for each in uncollected_objects}

    names = asyncio.run(run())
    assert not names & {"RPCState", "_ServicerContext", "AbortError", "GenerateCall", "GenerationFuture", "TokenStream"}


def test_callbacks_run_once_in_order_when_a_call_is_over_even_if_one_raises():
    ended, raised = [], []

    def fail():
        ended.append("fail")
        raise ValueError("expected by this test")

    async def call():
        add_done_callback(lambda: ended.append("first"))
        add_done_callback(fail)
        add_done_callback(lambda: ended.append("last"))
        await asyncio.sleep(0)
        assert not ended

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, error: raised.append(str(error["exception"])))
        await asyncio.gather(call())
        await asyncio.sleep(0)

    asyncio.run(run())
    assert ended == ["first", "fail", "last"]
    assert raised == ["expected by this test"]
