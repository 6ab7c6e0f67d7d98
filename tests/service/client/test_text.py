"""Text prompts and chats: both clients against a service with scripted answers."""

import asyncio
import concurrent.futures
import inspect
import subprocess
import sys

import grpc
import pytest

from radixkv.api.retention import Retention
from radixkv.service.client import AsyncClient, Client, FinishReason, MissReason, TextChunk
from radixkv.service.missing_package import MissingPackage
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.v1.cache_pb2 import PublicPrefix, RegisterPublicPrefixResponse, RetainResponse
from radixkv.v1.cache_pb2_grpc import CacheServiceServicer, add_CacheServiceServicer_to_server
from radixkv.v1.fleet_pb2 import RouteResponse
from radixkv.v1.fleet_pb2_grpc import FleetServiceServicer, add_FleetServiceServicer_to_server
from radixkv.v1.model_pb2 import TokenizerChunk
from radixkv.v1.model_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from radixkv.v1.prefill_pb2 import GenerateResponse, PrefillResponse, ProbeResponse, Usage
from radixkv.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server
from tests.patience import PATIENCE_S
from tests.service.text.tokenizers import byte_level

USER, END = 510, 511  # special tokens
CHAT = [{"role": "user", "content": "Hi"}]


class Service(PrefillServiceServicer, CacheServiceServicer, ModelServiceServicer, FleetServiceServicer):
    """Answers with a script, and records the requests.

    Attributes:
        script: the messages of every generation.
        requests: all that were received, in order.
        generation_ended: a future that is set when the first generation has ended, answered or cancelled.
    """

    def __init__(self):
        self.script = []
        self.requests = []
        self.generation_ended = concurrent.futures.Future()
        self.tokenizer = ModelTokenizer("tiny")

    def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        context.add_callback(self._note_end)
        yield from self.script

    def _note_end(self):
        if not self.generation_ended.done():
            self.generation_ended.set_result(True)

    def Prefill(self, request, context):  # noqa: N802
        self.requests.append(request)
        return PrefillResponse(next_token_id=7, miss_reason="DIVERGED")

    def Probe(self, request, context):  # noqa: N802
        self.requests.append(request)
        return ProbeResponse(prompt_tokens=len(request.token_ids))

    def Retain(self, request, context):  # noqa: N802
        self.requests.append(request)
        return RetainResponse()

    def RegisterPublicPrefix(self, request, context):  # noqa: N802
        self.requests.append(request)
        return RegisterPublicPrefixResponse(public_prefix=PublicPrefix(name=request.name))

    def Route(self, request, context):  # noqa: N802
        self.requests.append(request)
        return RouteResponse()

    def GetTokenizer(self, request, context):  # noqa: N802
        self.requests.append(request)
        data, digest = self.tokenizer.archive()
        yield TokenizerChunk(data=b"" if request.digest_only else data, sha256=digest)

    def prompts(self):
        """Return the token ids of the requests that have a prompt."""
        requests = [getattr(request, "prefill", request) for request in self.requests]
        return [list(request.token_ids) for request in requests if hasattr(request, "token_ids")]


@pytest.fixture(scope="module", autouse=True)
def cache_home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def address(service):
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
    add_PrefillServiceServicer_to_server(service, server)
    add_CacheServiceServicer_to_server(service, server)
    add_ModelServiceServicer_to_server(service, server)
    add_FleetServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture(params=["Client", "AsyncClient"])
def use(request, address):
    """Return a function that calls its argument with a client, and awaits the result; a stream is read into a list."""

    def blocking(function):
        with Client(address, timeout_s=PATIENCE_S) as client:
            result = function(client)
            return list(result) if hasattr(result, "__iter__") and not isinstance(result, str) else result

    async def awaited(function):
        async with AsyncClient(address, timeout_s=PATIENCE_S) as client:
            result = function(client)
            return await result if inspect.isawaitable(result) else [each async for each in result]

    return blocking if request.param == "Client" else lambda function: asyncio.run(awaited(function))


def result_of(*parts, index=0, reason="STOP"):
    """Return messages with these tokens, as a service sends them."""
    messages = [GenerateResponse(token_ids=part, index=index) for part in parts]
    messages[0].usage.CopyFrom(Usage(prompt_tokens=9, cached_tokens=4))
    messages[-1].MergeFrom(
        GenerateResponse(finished=True, finish_reason=reason, miss_reason="DIVERGED", usage=Usage(cached_tokens=4))
    )
    return messages


def test_a_text_becomes_the_token_ids_of_the_served_model(service, use):
    service.script = result_of([*b"!"])
    text = "Hello <|im_end|> Größe 🎉"
    ids = byte_level().encode(text)
    assert END in ids
    use(lambda client: client.prefill(text, tenant="t"))
    use(lambda client: client.generate(text))
    use(lambda client: client.probe(text))
    use(lambda client: client.retain(text, Retention(80)))
    use(lambda client: client.public.register("name", text))
    use(lambda client: client.route(text))
    assert service.prompts() == [ids] * 6


def test_token_ids_are_sent_and_answered_as_they_are_without_a_tokenizer(service, use):
    service.script = result_of([1, 2], [3])
    assert use(lambda client: client.generate([5, 6], max_new_tokens=3)) == service.script
    use(lambda client: client.prefill(range(3)))
    assert service.prompts() == [[5, 6], [0, 1, 2]]
    assert len(service.requests) == 2


def test_a_client_fetches_the_tokenizer_once(service, use):
    request_counts = []  # after three prefills

    def blocking(client):
        for _ in range(3):
            client.prefill("a")
        request_counts.append(len(service.requests))
        return client.tokenizer() is client.tokenizer()

    async def awaited(client):
        await asyncio.gather(*(client.prefill("a") for _ in range(3)))
        request_counts.append(len(service.requests))
        return await client.tokenizer() is await client.tokenizer()

    def prefill_three_times(client):
        return blocking(client) if isinstance(client, Client) else awaited(client)

    assert use(prefill_three_times)
    num_tokenizer_requests = request_counts[0] - 3
    assert num_tokenizer_requests in (1, 2), "one for the digest, and one for the files if they are not stored yet"
    service.requests.clear()
    assert use(prefill_three_times)
    assert request_counts[1] == 1 + 3


def test_another_model_at_the_same_address_is_noticed_by_tokenizer(service, address, tmp_path):
    with Client(address, timeout_s=PATIENCE_S) as client:
        before = client.tokenizer()
        (tmp_path / "tokenizer.json").write_text(byte_level().definition.replace("<|im_end|>", "<|other|>"))
        service.tokenizer = ModelTokenizer(str(tmp_path))
        client.prefill("<|other|>")
        assert client.tokenizer() is not before
        client.prefill("<|other|>")
    as_text, as_token = service.prompts()
    assert len(as_text) > 1
    assert as_token == [END]


def test_text_is_streamed_as_it_is_generated_and_can_be_read_whole(service, use):
    euro = "€".encode()
    service.script = result_of([*b"5 "], [*euro[:2]], [euro[2], ord(" ")], [END, *b"ok"], reason="LENGTH")
    chunks = use(lambda client: client.generate("a", max_new_tokens=9))
    assert [chunk.text for chunk in chunks] == ["5 ", "", "€ ", "ok"]
    assert [list(chunk.token_ids) for chunk in chunks] == [list(each.token_ids) for each in service.script]
    assert [chunk.response for chunk in chunks] == service.script
    first, *_, last = chunks
    assert (first.finished, first.finish_reason, first.miss_reason) == (False, None, None)
    assert (last.finished, last.finish_reason, last.miss_reason) == (True, "LENGTH", "DIVERGED")
    assert (first.usage.prompt_tokens, last.usage.cached_tokens) == (9, 4)
    assert use(lambda client: client.generate("a").read()) == "5 € ok"


def test_bytes_that_never_become_text_come_with_the_last_part(service, use):
    service.script = result_of([0xE2], [0x82])
    assert [chunk.text for chunk in use(lambda client: client.generate("a"))] == ["", "\ufffd"]


def test_a_stop_string_is_not_part_of_the_text(service, use):
    service.script = result_of([*b"one."], [*b" t"], [*b"wo"], [*b"! three"])
    assert [chunk.text for chunk in use(lambda client: client.generate("a", stop=["two!", "x"]))] == [
        "o",
        "ne",
        ". ",
        "",
    ]
    request = service.requests[-1]
    assert (list(request.stop), request.max_new_tokens) == (["two!", "x"], 0)
    assert use(lambda client: client.generate("a", stop=None, min_tokens=None).read()) == "one. two! three"


def test_several_answers_have_texts_of_their_own(service, address):
    one, two = result_of([*b"a"], [*b"b"]), result_of([0xC3], [0xA9], index=1)
    service.script = [one[0], two[0], two[1], one[1]]
    with Client(address, timeout_s=PATIENCE_S) as client:
        answer = client.generate("x", n=2)
        assert [(chunk.index, chunk.text) for chunk in answer] == [(0, "a"), (1, ""), (1, "é"), (0, "b")]
        assert (answer.text, answer.texts) == ("ab", ["ab", "é"])
        assert answer.read() == "ab", "nothing is left"


def test_the_messages_of_an_answer_are_joined(service, address):
    service.script = result_of([1, 2], [3])

    async def awaited():
        async with AsyncClient(address, timeout_s=PATIENCE_S) as client:
            answer = client.generate("x")
            assert (answer.text, answer.texts, answer.response) == ("", [], GenerateResponse())
            await answer.read()
            return answer

    with Client(address, timeout_s=PATIENCE_S) as client:
        blocking_answer = client.generate("x")
        blocking_answer.read()
    for answer in (blocking_answer, asyncio.run(awaited())):
        assert list(answer.response.token_ids) == [1, 2, 3]
        assert FinishReason.Name(answer.response.finish_reason) == "STOP"
        assert MissReason.Name(answer.response.miss_reason) == "DIVERGED"
        assert answer.texts == ["\x01\x02\x03"]


def test_a_blank_at_the_start_of_an_answer_is_kept(service, use):
    (token_id,) = byte_level().encode(" the")
    service.script = result_of([token_id])
    assert use(lambda client: client.generate("a").read()) == " the"


def test_a_chat_is_rendered_by_the_template_of_the_model(service, use):
    service.script = result_of([*b"Hi"], [END])
    assert [chunk.text for chunk in use(lambda client: client.chat(CHAT, tenant="t", stop=["x"]))] == ["Hi", ""]
    assert service.prompts() == [byte_level().encode_chat(CHAT)]
    assert (service.requests[-1].prefill.tenant, list(service.requests[-1].stop)) == ("t", ["x"])


def test_arguments_of_the_template_are_passed_on(service, use, tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_level().definition)
    (tmp_path / "chat_template.jinja").write_text("{{ [messages, tools, documents, add_generation_prompt, think] }}")
    service.script = result_of([1])
    service.tokenizer = ModelTokenizer(str(tmp_path))
    options = {"tools": [{"name": "w"}], "documents": [{"text": "d"}], "chat_template_kwargs": {"think": False}}
    use(lambda client: client.chat([{"role": "user"}], **options))
    expected = "[[{'role': 'user'}], [{'name': 'w'}], [{'text': 'd'}], True, False]"
    assert byte_level().decode(service.prompts()[0]) == expected


def test_text_that_cannot_be_a_prompt_is_refused_before_it_is_sent(service, use):
    with pytest.raises(TypeError, match=r"^temperature: expected a number, got 'hot'$"):
        use(lambda client: client.generate("a", temperature="hot"))
    with pytest.raises(TypeError, match="stop: expected a sequence of strings, got 'x'"):
        use(lambda client: client.chat(CHAT, stop="x"))
    with pytest.raises(ValueError, match=r"^expected text in Unicode, got lone surrogates$"):
        use(lambda client: client.prefill("\ud800"))
    with pytest.raises(ValueError, match="expected at least one message, got none"):
        use(lambda client: client.chat([]))
    with pytest.raises(TypeError, match="token_ids: expected integers, got bytes"):
        use(lambda client: client.prefill(b"bytes"))
    assert service.prompts() == []


def test_closing_an_answer_cancels_its_call(service, address):
    service.script = result_of(*([1] for _ in range(100_000)))
    with Client(address, timeout_s=PATIENCE_S) as client:
        answer = client.generate("a")
        next(answer)
        answer.close()
        assert service.generation_ended.result(PATIENCE_S)
        assert list(answer) == []


def test_closing_an_awaited_answer_cancels_its_call_or_never_makes_it(service, address):
    service.script = result_of(*([1] for _ in range(100_000)))

    async def run():
        async with AsyncClient(address, timeout_s=PATIENCE_S) as client:
            unread = client.generate("a")
            await unread.aclose()
            assert [each async for each in unread] == []
            assert service.requests == []
            answer = client.generate("a")
            await anext(answer)
            await answer.aclose()
            await asyncio.to_thread(service.generation_ended.result, PATIENCE_S)
            assert [each async for each in answer] == []

    asyncio.run(run())


def test_text_without_the_package_tokenizers_names_the_command_that_installs_it(use, monkeypatch):
    monkeypatch.setitem(sys.modules, "radixkv.service.text.tokenizer_directory", None)
    for call in (lambda client: client.prefill("a"), lambda client: client.chat(CHAT).read()):
        with pytest.raises(MissingPackage, match=r"the package tokenizers is missing; .* pip install '\.\[text\]'"):
            use(call)


def test_names_of_newer_services_are_their_numbers():
    chunk = TextChunk("", GenerateResponse(finished=True, finish_reason=9, miss_reason=99))
    assert (chunk.finish_reason, chunk.miss_reason) == ("9", "99")


def test_the_package_exports_the_clients_without_importing_the_engine():
    program = (
        "import sys, radixkv\n"
        "assert not {'grpc', 'numpy', 'radixkv.service'} & set(sys.modules)\n"
        "from radixkv import AsyncClient, Client\n"
        "import radixkv.service.client\n"
        "assert (AsyncClient, Client) == (radixkv.service.client.AsyncClient, radixkv.service.client.Client)\n"
        "assert not {'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "assert not hasattr(radixkv, 'Other')\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], timeout=PATIENCE_S, check=True)
