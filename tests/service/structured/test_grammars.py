import asyncio
import gc
import sys
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("llguidance")

from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest, QueueFull
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.structured import grammars as grammars_module
from radixkv.service.structured.compilation import Compilation
from radixkv.service.structured.grammar_text import MAX_CHARS, GrammarText
from radixkv.service.structured.grammars import MAX_CACHED, MAX_WAITING, Grammars
from radixkv.service.text.tokenizer import Tokenizer
from tests.patience import PATIENCE_S

SAMPLING = Sampling(5, seed=1)
MINE, OTHERS = QuotaKey.of_tenant("mine"), QuotaKey.of_tenant("others")


def regex(text: str) -> GrammarText:
    return GrammarText("regex", "regex", text)


def make_grammars(model_path: str | None = "tiny") -> Grammars:
    return Grammars(ModelTokenizer(model_path), 512, frozenset())


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Allow texts the time to compile that a busy machine needs."""
    monkeypatch.setattr(grammars_module, "MAX_COMPILE_S", PATIENCE_S)


@pytest.fixture
def compiled(monkeypatch):
    """Record the texts whose compilation has begun, in order. While `gate` is held, none of them ends."""
    recorded = SimpleNamespace(texts=[], gate=threading.Lock())
    compile_text = Grammars._compile

    def compile_and_record(self, text, vocabulary):
        recorded.texts.append(text.text)
        with recorded.gate:
            return compile_text(self, text, vocabulary)

    monkeypatch.setattr(Grammars, "_compile", compile_and_record)
    return recorded


@pytest.fixture
def started_waits_s(monkeypatch):
    """Record the time limit of each wait for a compilation that has begun."""
    limits_s, constraint = [], Compilation.constraint

    async def wait_and_record(self, limit_s):
        limits_s.append(limit_s)
        return await constraint(self, limit_s)

    monkeypatch.setattr(Compilation, "constraint", wait_and_record)
    return limits_s


def test_without_a_text_nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(Tokenizer, "load", lambda *_: pytest.fail("no request needs it"))
    assert asyncio.run(make_grammars().constrain(SAMPLING, None, MINE)) is SAMPLING


def test_the_other_sampling_options_are_unchanged():
    constrained = asyncio.run(make_grammars().constrain(SAMPLING, regex("a+"), MINE))
    assert constrained.constraint is not None
    assert (constrained.max_new_tokens, constrained.seed) == (5, 1)


def test_a_text_is_compiled_once_for_waiting_and_later_callers(compiled):
    async def ask():
        grammars = make_grammars()
        calls = [grammars.constrain(SAMPLING, regex("a+"), MINE) for _ in range(5)]
        together = await asyncio.gather(*calls, grammars.constrain(SAMPLING, regex("b+"), MINE))
        later = await grammars.constrain(SAMPLING, regex("a+"), MINE)
        return [each.constraint for each in (*together, later)]

    *same, other, again = asyncio.run(ask())
    assert {id(each) for each in same} == {id(again)}
    assert other is not again
    assert compiled.texts == ["a+", "b+"]


def test_the_most_recently_used_texts_stay_cached(compiled):
    async def ask():
        grammars = make_grammars()
        for number in range(MAX_CACHED):
            await grammars.constrain(SAMPLING, regex(f"a{number}"), MINE)
        await grammars.constrain(SAMPLING, regex("a0"), MINE)
        await grammars.constrain(SAMPLING, regex("new"), MINE)
        for text in ("a0", "new", "a2", "a1"):
            await grammars.constrain(SAMPLING, regex(text), MINE)
        return grammars

    grammars = asyncio.run(ask())
    assert compiled.texts[MAX_CACHED:] == ["new", "a1"]
    assert len(grammars._cache) == MAX_CACHED


def test_a_cancelled_caller_does_not_affect_others(compiled):
    async def ask():
        grammars = make_grammars()
        with compiled.gate:
            cancelled, other = (asyncio.create_task(grammars.constrain(SAMPLING, regex("a+"), MINE)) for _ in range(2))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        return (await other).constraint

    assert asyncio.run(ask()) is not None
    assert compiled.texts == ["a+"]


def test_a_caller_that_waits_too_long_is_refused_and_the_others_are_still_compiled(
    compiled, started_waits_s, monkeypatch
):
    async def ask():
        grammars = make_grammars()
        with compiled.gate:
            first = asyncio.create_task(grammars.constrain(SAMPLING, regex("a+"), MINE))
            while not (compiled.texts and started_waits_s):
                await asyncio.sleep(0.001)
            monkeypatch.setattr(grammars_module, "MAX_COMPILE_S", 0.01)
            with pytest.raises(InvalidRequest, match=r"^regex: compiling it takes more than 0.01 s"):
                await grammars.constrain(SAMPLING, regex("a+"), MINE)
            with pytest.raises(QueueFull, match=r"^regex: other grammars were compiled for 0.01 s; try again later"):
                await grammars.constrain(SAMPLING, regex("b+"), MINE)
            monkeypatch.setattr(grammars_module, "MAX_COMPILE_S", PATIENCE_S)
        return [(await first).constraint, (await grammars.constrain(SAMPLING, regex("b+"), MINE)).constraint]

    assert None not in asyncio.run(ask())
    assert compiled.texts == ["a+", "b+"]


def test_the_tokenizer_is_loaded_outside_the_time_to_compile(monkeypatch):
    may_load, load = threading.Event(), ModelTokenizer.load

    def load_late(self):
        assert may_load.wait(PATIENCE_S)
        return load(self)

    async def ask():
        grammars = make_grammars()
        monkeypatch.setattr(grammars_module, "MAX_COMPILE_S", 0.01)
        calls = [asyncio.create_task(grammars.constrain(SAMPLING, regex(text), MINE)) for text in ("a+", "a+", "b+")]
        await asyncio.sleep(0.1)
        monkeypatch.setattr(grammars_module, "MAX_COMPILE_S", PATIENCE_S)
        may_load.set()
        return [each.constraint for each in await asyncio.gather(*calls)]

    monkeypatch.setattr(ModelTokenizer, "load", load_late)
    assert None not in asyncio.run(ask())


def test_a_text_that_fails_after_all_its_callers_are_gone_is_not_logged(compiled, started_waits_s, monkeypatch):
    async def ask():
        logged, grammars = [], make_grammars()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        with compiled.gate:
            first = asyncio.create_task(grammars.constrain(SAMPLING, regex("(a"), MINE))
            while not (compiled.texts and started_waits_s):
                await asyncio.sleep(0.001)
            monkeypatch.setattr(grammars_module, "MAX_COMPILE_S", 0.01)
            with pytest.raises(InvalidRequest, match="compiling it takes more than"):
                await grammars.constrain(SAMPLING, regex("(a"), MINE)
            first.cancel()
        monkeypatch.setattr(grammars_module, "MAX_COMPILE_S", PATIENCE_S)
        with pytest.raises(InvalidRequest, match="llguidance can't use it"):
            await grammars.constrain(SAMPLING, regex("(a"), MINE)
        del grammars, first  # an exception that nothing retrieved is logged only when its task is collected
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
        grammars = make_grammars()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for number in range(2 * MAX_WAITING + 1):
                call = asyncio.create_task(grammars.constrain(SAMPLING, regex(f"a{number}"), MINE))
                await asyncio.sleep(0)
                assert call.done()
                with pytest.raises(QueueFull, match=r"^regex: no thread can be started to compile it"):
                    await call
        return [(await grammars.constrain(SAMPLING, regex(text), MINE)).constraint for text in ("a0", "b")]

    assert None not in asyncio.run(ask())
    assert "no thread can be started to compile it: can't start new thread" in caplog.text


def test_too_many_queued_grammars_are_refused(compiled):
    async def ask():
        grammars = make_grammars()
        with compiled.gate:
            waiting = [
                asyncio.create_task(grammars.constrain(SAMPLING, regex(f"a{number}"), MINE))
                for number in range(MAX_WAITING)
            ]
            await asyncio.sleep(0)
            with pytest.raises(
                QueueFull,
                match="at most an equal share of 32 grammars that wait to be compiled for this tenant, got 33",
            ):
                await grammars.constrain(SAMPLING, regex("b"), MINE)
        await asyncio.gather(*waiting)
        return (await grammars.constrain(SAMPLING, regex("b"), MINE)).constraint

    assert asyncio.run(ask()) is not None


def test_waiting_texts_of_one_tenant_do_not_refuse_others_and_tenants_take_turns(compiled):
    async def ask():
        grammars = make_grammars()
        with compiled.gate:
            waiting = [
                asyncio.create_task(grammars.constrain(SAMPLING, regex(f"a{number}"), OTHERS))
                for number in range(MAX_WAITING)
            ]
            while not compiled.texts:
                await asyncio.sleep(0.001)
            mine = [asyncio.create_task(grammars.constrain(SAMPLING, regex(f"b{number}"), MINE)) for number in range(2)]
            await asyncio.sleep(0)
        answers = await asyncio.gather(*waiting, *mine, return_exceptions=True)
        return [each for each in answers if isinstance(each, BaseException)]

    assert asyncio.run(ask()) == []
    assert compiled.texts[:5] == ["a0", "a1", "b0", "a2", "b1"]
    assert len(compiled.texts) == MAX_WAITING + 2


def test_grammars_of_a_tenant_evict_its_own_and_not_those_of_others(compiled):
    async def ask():
        grammars = make_grammars()
        await grammars.constrain(SAMPLING, regex("mine"), MINE)
        for number in range(MAX_CACHED):
            await grammars.constrain(SAMPLING, regex(f"a{number}"), OTHERS)
        await grammars.constrain(SAMPLING, regex("mine"), MINE)

    asyncio.run(ask())
    assert compiled.texts.count("mine") == 1


def test_a_text_is_compiled_for_each_tenant_so_that_none_learns_the_texts_of_others(compiled):
    async def ask():
        grammars = make_grammars()
        return [(await grammars.constrain(SAMPLING, regex("a+"), each)).constraint for each in (MINE, OTHERS, MINE)]

    mine, others, again = asyncio.run(ask())
    assert mine is again is not others
    assert compiled.texts == ["a+", "a+"]


@pytest.mark.parametrize("text", ["(a", "b" * (MAX_CHARS["regex"] + 1)])
def test_an_invalid_grammar_is_refused_each_time(text, compiled):
    async def ask():
        grammars = make_grammars()
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=r"^regex: "):
                await grammars.constrain(SAMPLING, regex(text), MINE)

    asyncio.run(ask())
    num_compiled = 1 if text == "(a" else 0  # a text that is too long is refused before
    assert len(compiled.texts) == num_compiled


def test_the_error_for_a_model_without_a_tokenizer_contains_no_path(tmp_path, caplog):
    (tmp_path / "config.json").write_text("{}")
    for path in (None, str(tmp_path)):
        with pytest.raises(InvalidRequest) as refused:
            asyncio.run(make_grammars(path).constrain(SAMPLING, regex("a"), MINE))
        assert str(refused.value) == "regex: the model has no tokenizer that llguidance can read"
    assert "the model has no suitable tokenizer" in caplog.text


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "radixkv.service.structured.vocabulary", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(make_grammars().constrain(SAMPLING, regex("a"), MINE))
    assert str(refused.value) == (
        "regex: the package llguidance is missing; install it from a checkout of radixkv: pip install '.[structured]'"
    )


# The syntax of a text, and a function that writes such a text with n rules or definitions.
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


@pytest.mark.parametrize("shape", LONGEST)
def test_the_longest_texts_do_not_overflow_the_stack(shape):
    """A stack overflow in llguidance would end this process. Such a text may be refused."""
    kind, write = LONGEST[shape]
    count = max(count for count in range(1, 5_000, 10) if len(write(count)) <= MAX_CHARS[kind])
    text = GrammarText("field", kind, write(count))
    assert count > 400
    try:
        constrained = asyncio.run(make_grammars().constrain(SAMPLING, text, MINE))
    except InvalidRequest:
        return
    assert constrained.constraint.start(frozenset()).allowed().any()
