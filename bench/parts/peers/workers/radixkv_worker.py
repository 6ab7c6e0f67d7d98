"""Runs radixkv: its server in a separate process, called over gRPC with its client. The mode is exact or fast."""

from __future__ import annotations

import os
import queue
import time
from typing import TYPE_CHECKING

from bench.parts.peers.workers.loop import WorkerAnswer, WorkerOptions, run_in_threads, run_worker
from bench.parts.peers.workers.task import Done, Task
from bench.parts.server_process import ServerProcess, serve_command

if TYPE_CHECKING:
    from radixkv.service.client.client import Client

_START_TIMEOUT_S = 900.0


class RadixKV:
    """A server, and a client with a connection of its own for each request in flight."""

    packages = ("radixkv", "torch", "grpcio")

    def __init__(self, options: WorkerOptions) -> None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        # Python must write the bytecode of radixkv once, as pip does for a peer. With this variable it would not.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        settings = [f"model.exactness={options.mode}", f"model.dtype={options.dtype}"]
        if options.context_tokens:
            settings.append(f"cache.capacity_tokens={options.context_tokens}")
        self._server = ServerProcess(
            serve_command(str(options.model), "cpu", settings), start_timeout_s=_START_TIMEOUT_S
        )
        self._address = self._server.__enter__()
        self._idle_clients: queue.SimpleQueue[Client] = queue.SimpleQueue()
        self._clients: list[Client] = []
        self.notes = ["over gRPC, server and client in processes of their own"]

    def run(self, task: Task) -> Done:
        """Send the prompts."""
        # Imported only when the server is ready, because the import is not part of a measured start.
        from radixkv.service.client.client import Client

        while len(self._clients) < task.at_once:
            client = Client(self._address, options=[("grpc.use_local_subchannel_pool", 1)], timeout_s=_START_TIMEOUT_S)
            self._clients.append(client)
            self._idle_clients.put(client)
        return run_in_threads(task, lambda prompt: self._ask(prompt, task.new_tokens))

    def _ask(self, prompt: list[int], new_tokens: int) -> WorkerAnswer:
        client = self._idle_clients.get()
        try:
            start_s = time.perf_counter()
            if new_tokens == 1:
                answer = client.prefill(prompt)
                first_s = time.perf_counter() - start_s
                return WorkerAnswer(first_s, [answer.next_token_id], answer.usage.cached_tokens)
            token_ids: list[int] = []
            cached_tokens, first_s = None, 0.0
            for chunk in client.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True):
                if not token_ids and chunk.token_ids:
                    first_s, cached_tokens = time.perf_counter() - start_s, chunk.usage.cached_tokens
                token_ids += chunk.token_ids
            return WorkerAnswer(first_s, token_ids, cached_tokens)
        finally:
            self._idle_clients.put(client)

    def close(self) -> None:
        """Close the connections and stop the server."""
        for client in self._clients:
            client.close()
        self._server.stop()


if __name__ == "__main__":
    run_worker(RadixKV)
