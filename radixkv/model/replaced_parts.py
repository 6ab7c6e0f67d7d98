"""Replaces the forward passes of a model's parts, and lets them run as they were written."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from radixkv.model.part_trial import Forward, Refused

_log = logging.getLogger(__name__)


class ReplacedParts:
    """Replaces `forward` of known parts of a model. Nothing outside this model changes.

    A part that looks known but computes something else stays as it is, and the log names its class once. While a
    module that is replaced has hooks, its part runs as transformers wrote it, so that the hooks are called.

    Args:
        module: the model, on its device and in evaluation mode.
        known_forward: finds the replacement of a part's forward pass, which is called with the part first; None for a
            part that does not look known. Raises `Refused` for one that fails its trial. It is asked about a part after
            those inside it.

    Attributes:
        names: names of the replaced parts.
    """

    def __init__(self, module: nn.Module, known_forward: Callable[[Any], Forward | None]) -> None:
        self._forwards: dict[nn.Module, Forward] = {}
        names: list[str] = []
        refused: dict[str, str] = {}  # by class
        # A layer comes after its norms. Nothing is replaced before the last trial.
        for name, part in reversed(list(module.named_modules())):
            try:
                forward = known_forward(part)
            except Refused as refusal:
                refused[type(part).__name__] = str(refusal)
            else:
                if forward is not None:
                    names.append(name)
                    self._forwards[part] = partial(forward, part)
        self.names = tuple(reversed(names))
        for class_name, reason in refused.items():
            _log.info("%s runs as it was written: %s", class_name, reason)
        self._replace()

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Let all parts run as transformers wrote them, inside the `with` block."""
        for part in self._forwards:
            del vars(part)["forward"]
        try:
            yield
        finally:
            self._replace()

    def _replace(self) -> None:
        for part, forward in self._forwards.items():
            vars(part)["forward"] = forward
