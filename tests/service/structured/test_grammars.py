import asyncio
import gc
import sys
import threading

import pytest

pytest.importorskip("llguidance")

from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest, QueueFull
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.structured import grammars as module
from radixkv.service.structured.compilation import Compilation
from radixkv.service.structured.grammar_text import MAX_CHARS, GrammarText
from radixkv.service.structured.grammars import MAX_CACHED, MAX_WAITING, Grammars
from radixkv.service.text.tokenizer import Tokenizer
from tests.patience import PATIENCE_S

SAMPLING = Sampling(5, seed=1)
MINE, OTHERS = QuotaKey.of_tenant("mine"), QuotaKey.of_tenant("others")


def regex(text: str) -> GrammarText:
    return GrammarText("regex", "regex", text)


def grammars(model_path: str | None = "tiny") -> Grammars:
    return Grammars(ModelTokenizer(model_path), 512, frozenset())


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Allow texts the time to compile that a busy machine needs."""
    monkeypatch.setattr(module, "MAX_COMPILE_S", PATIENCE_S)


@pytest.fixture
def compiled(monkeypatch):
    """Record what is compiled, in order. While the lock is held, nothing is compiled."""
    texts, gate = [], threading.Lock()
    compile_text = Grammars._compile

    def note(self, text, vocabulary):
        texts.append(text.text)
        with gate:
            return compile_text(self, text, vocabulary)

    monkeypatch.setattr(Grammars, "_compile", note)
    return texts, gate


@pytest.fixture
def limits(monkeypatch):
    """Record the limit of each wait that has begun."""
    limits, constraint = [], Compilation.constraint

    async def note(self, limit_s):
        limits.append(limit_s)
        return await constraint(self, limit_s)

    monkeypatch.setattr(Compilation, "constraint", note)
    return limits


def test_without_a_text_nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(Tokenizer, "load", lambda *_: pytest.fail("no request needs it"))
    assert asyncio.run(grammars().constrain(SAMPLING, None, MINE)) is SAMPLING


def test_the_other_sampling_options_are_unchanged():
    constrained = asyncio.run(grammars().constrain(SAMPLING, regex("a+"), MINE))
    assert constrained.constraint is not None
    assert (constrained.max_new_tokens, constrained.seed) == (5, 1)


def test_a_text_is_compiled_once_for_waiting_and_later_callers(compiled):
    async def ask():
        made = grammars()
        asked = [made.constrain(SAMPLING, regex("a+"), MINE) for _ in range(5)]
        together = await asyncio.gather(*asked, made.constrain(SAMPLING, regex("b+"), MINE))
        return [each.constraint for each in [*together, await made.constrain(SAMPLING, regex("a+"), MINE)]]

    *same, other, again = asyncio.run(ask())
    assert {id(each) for each in same} == {id(again)}
    assert other is not again
    assert compiled[0] == ["a+", "b+"]


def test_the_latest_texts_are_kept(compiled):
    async def ask():
        made = grammars()
        for number in range(MAX_CACHED):
            await made.constrain(SAMPLING, regex(f"a{number}"), MINE)
        await made.constrain(SAMPLING, regex("a0"), MINE)
        await made.constrain(SAMPLING, regex("new"), MINE)
        for text in ("a0", "new", "a2", "a1"):
            await made.constrain(SAMPLING, regex(text), MINE)
        return made

    made = asyncio.run(ask())
    assert compiled[0][MAX_CACHED:] == ["new", "a1"]
    assert len(made._cache) == MAX_CACHED


def test_a_cancelled_caller_does_not_affect_others(compiled):
    async def ask():
        made = grammars()
        with compiled[1]:
            cancelled, stays = (asyncio.create_task(made.constrain(SAMPLING, regex("a+"), MINE)) for _ in range(2))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        return (await stays).constraint

    assert asyncio.run(ask()) is not None
    assert compiled[0] == ["a+"]


def test_a_caller_that_waits_too_long_is_refused_and_the_others_are_still_compiled(compiled, limits, monkeypatch):
    async def ask():
        made = grammars()
        with compiled[1]:
            first = asyncio.create_task(made.constrain(SAMPLING, regex("a+"), MINE))
            while not (compiled[0] and limits):
                await asyncio.sleep(0.001)
            monkeypatch.setattr(module, "MAX_COMPILE_S", 0.01)
            with pytest.raises(InvalidRequest, match=r"^regex: compiling it takes more than 0.01 s"):
                await made.constrain(SAMPLING, regex("a+"), MINE)
            with pytest.raises(QueueFull, match=r"^regex: other grammars were compiled for 0.01 s; try again later"):
                await made.constrain(SAMPLING, regex("b+"), MINE)
            monkeypatch.setattr(module, "MAX_COMPILE_S", PATIENCE_S)
        return [(await first).constraint, (await made.constrain(SAMPLING, regex("b+"), MINE)).constraint]

    assert None not in asyncio.run(ask())
    assert compiled[0] == ["a+", "b+"]


def test_the_tokenizer_is_loaded_outside_the_time_to_compile(monkeypatch):
    may_load, load = threading.Event(), ModelTokenizer.load

    def load_late(self):
        assert may_load.wait(PATIENCE_S)
        return load(self)

    async def ask():
        made = grammars()
        monkeypatch.setattr(module, "MAX_COMPILE_S", 0.01)
        asked = [asyncio.create_task(made.constrain(SAMPLING, regex(text), MINE)) for text in ("a+", "a+", "b+")]
        await asyncio.sleep(0.1)
        monkeypatch.setattr(module, "MAX_COMPILE_S", PATIENCE_S)
        may_load.set()
        return [each.constraint for each in await asyncio.gather(*asked)]

    monkeypatch.setattr(ModelTokenizer, "load", load_late)
    assert None not in asyncio.run(ask())


def test_a_text_that_fails_after_all_its_callers_are_gone_is_not_logged(compiled, limits, monkeypatch):
    async def ask():
        logged, made = [], grammars()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        with compiled[1]:
            first = asyncio.create_task(made.constrain(SAMPLING, regex("(a"), MINE))
            while not (compiled[0] and limits):
                await asyncio.sleep(0.001)
            monkeypatch.setattr(module, "MAX_COMPILE_S", 0.01)
            with pytest.raises(InvalidRequest, match="compiling it takes more than"):
                await made.constrain(SAMPLING, regex("(a"), MINE)
            first.cancel()
        monkeypatch.setattr(module, "MAX_COMPILE_S", PATIENCE_S)
        with pytest.raises(InvalidRequest, match="llguidance can't use it"):
            await made.constrain(SAMPLING, regex("(a"), MINE)
        del made, first  # whose texts keep what waited for them
        await asyncio.sleep(0.01)
        gc.collect()
        return logged

    assert asyncio.run(ask()) == []


def test_without_a_thread_a_text_is_refused_and_the_next_one_is_compiled(monkeypatch, caplog):
    start = threading.Thread.start

    def refuse(self):
        if self.name == "radixkv-grammars":
            raise RuntimeError("can't start new thread")
        start(self)

    async def ask():
        made = grammars()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for number in range(2 * MAX_WAITING + 1):
                asked = asyncio.create_task(made.constrain(SAMPLING, regex(f"a{number}"), MINE))
                await asyncio.sleep(0)
                assert asked.done()
                with pytest.raises(QueueFull, match=r"^regex: no thread can be started to compile it"):
                    await asked
        return [(await made.constrain(SAMPLING, regex(text), MINE)).constraint for text in ("a0", "b")]

    assert None not in asyncio.run(ask())
    assert "no thread can be started to compile it: can't start new thread" in caplog.text


def test_too_many_queued_grammars_are_refused(compiled):
    async def ask():
        made = grammars()
        with compiled[1]:
            waiting = [
                asyncio.create_task(made.constrain(SAMPLING, regex(f"a{number}"), MINE))
                for number in range(MAX_WAITING)
            ]
            await asyncio.sleep(0)
            with pytest.raises(
                QueueFull,
                match="at most an equal share of 32 grammars that wait to be compiled for this tenant, got 33",
            ):
                await made.constrain(SAMPLING, regex("b"), MINE)
        await asyncio.gather(*waiting)
        return (await made.constrain(SAMPLING, regex("b"), MINE)).constraint

    assert asyncio.run(ask()) is not None


def test_waiting_texts_of_one_tenant_do_not_refuse_others_and_tenants_take_turns(compiled):
    async def ask():
        made = grammars()
        with compiled[1]:
            waiting = [
                asyncio.create_task(made.constrain(SAMPLING, regex(f"a{number}"), OTHERS))
                for number in range(MAX_WAITING)
            ]
            while not compiled[0]:
                await asyncio.sleep(0.001)
            mine = [asyncio.create_task(made.constrain(SAMPLING, regex(f"b{number}"), MINE)) for number in range(2)]
            await asyncio.sleep(0)
        answers = await asyncio.gather(*waiting, *mine, return_exceptions=True)
        return [each for each in answers if isinstance(each, BaseException)]

    assert asyncio.run(ask()) == []
    assert compiled[0][:5] == ["a0", "a1", "b0", "a2", "b1"]
    assert len(compiled[0]) == MAX_WAITING + 2


def test_grammars_of_a_tenant_evict_its_own_and_not_those_of_others(compiled):
    async def ask():
        made = grammars()
        await made.constrain(SAMPLING, regex("mine"), MINE)
        for number in range(MAX_CACHED):
            await made.constrain(SAMPLING, regex(f"a{number}"), OTHERS)
        await made.constrain(SAMPLING, regex("mine"), MINE)

    asyncio.run(ask())
    assert compiled[0].count("mine") == 1


def test_a_text_is_compiled_for_each_tenant_so_that_none_learns_those_of_others(compiled):
    async def ask():
        made = grammars()
        return [(await made.constrain(SAMPLING, regex("a+"), each)).constraint for each in (MINE, OTHERS, MINE)]

    mine, others, again = asyncio.run(ask())
    assert mine is again is not others
    assert compiled[0] == ["a+", "a+"]


@pytest.mark.parametrize("text", ["(a", "b" * (MAX_CHARS["regex"] + 1)])
def test_an_invalid_grammar_is_refused_each_time(text, compiled):
    async def ask():
        made = grammars()
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"^regex: "):
                await made.constrain(SAMPLING, regex(text), MINE)

    asyncio.run(ask())
    assert len(compiled[0]) == (text == "(a")


def test_a_model_without_a_tokenizer_is_named_and_no_path(tmp_path, caplog):
    (tmp_path / "config.json").write_text("{}")
    for path in (None, str(tmp_path)):
        with pytest.raises(InvalidRequest) as refused:
            asyncio.run(grammars(path).constrain(SAMPLING, regex("a"), MINE))
        assert str(refused.value) == "regex: the model has no tokenizer that llguidance can read"
    assert "the model has no suitable tokenizer" in caplog.text


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "radixkv.service.structured.vocabulary", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(grammars().constrain(SAMPLING, regex("a"), MINE))
    assert str(refused.value) == (
        "regex: the package llguidance is missing; install it from a checkout of radixkv: pip install '.[structured]'"
    )


LONGEST = {
    "rules that lead on": (
        "grammar",
        lambda n: "start: r0\n" + "".join(f'r{i}:"x"r{i + 1}"y"\n' for i in range(n)) + f'r{n}:"z"',
    ),
    "rules in a circle": (
        "grammar",
        lambda n: "start: r0\n" + "".join(f'r{i}:"x"* r{(i + 1) % n}?\n' for i in range(n)),
    ),
    "rules that may be empty": (
        "grammar",
        lambda n: "start: r0\n" + "".join(f'r{i}:r{i + 1}|"x"?\n' for i in range(n)) + f'r{n}:"z"',
    ),
    "terminals that lead on": (
        "grammar",
        lambda n: "start: T0\n" + "".join(f'T{i}:"x"T{i + 1}\n' for i in range(n)) + f'T{n}:"z"',
    ),
    "references that lead on": (
        "json_schema",
        lambda n: (
            '{"$ref":"#/$defs/0","$defs":{'
            + "".join(f'"{i}":{{"items":{{"$ref":"#/$defs/{i + 1}"}},"type":"array","minItems":1}},' for i in range(n))
            + f'"{n}":{{}}}}}}'
        ),
    ),
    "objects of references": (
        "json_schema",
        lambda n: (
            '{"$ref":"#/$defs/0","$defs":{'
            + "".join(
                f'"{i}":{{"type":"object","properties":{{"p":{{"$ref":"#/$defs/{i + 1}"}}}},"required":["p"]}},'
                for i in range(n)
            )
            + f'"{n}":{{}}}}}}'
        ),
    ),
    "references of references": (
        "json_schema",
        lambda n: (
            '{"$ref":"#/$defs/0","$defs":{'
            + "".join(f'"{i}":{{"$ref":"#/$defs/{i + 1}"}},' for i in range(n))
            + f'"{n}":{{}}}}}}'
        ),
    ),
    "all of references": (
        "json_schema",
        lambda n: (
            '{"$ref":"#/$defs/0","$defs":{'
            + "".join(f'"{i}":{{"allOf":[{{"$ref":"#/$defs/{i + 1}"}}]}},' for i in range(n))
            + f'"{n}":{{}}}}}}'
        ),
    ),
}


@pytest.mark.parametrize("what", LONGEST)
def test_the_longest_texts_need_less_stack_than_there_is(what):
    """A stack that overflows would end this process."""
    kind, write = LONGEST[what]
    count = max(count for count in range(1, 5_000, 10) if len(write(count)) <= MAX_CHARS[kind])
    text = GrammarText("field", kind, write(count))
    assert count > 400
    try:
        constrained = asyncio.run(grammars().constrain(SAMPLING, text, MINE))
    except InvalidRequest:
        return
    assert constrained.constraint.start(frozenset()).allowed().any()
