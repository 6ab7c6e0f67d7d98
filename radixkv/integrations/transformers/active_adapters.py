"""The LoRA adapters of a model, which PEFT inserts as layers."""

from __future__ import annotations

from typing import Any


class ActiveAdapters:
    """The layers of a model that have adapters.

    Args:
        model: the model. This object becomes outdated if PEFT inserts further layers. That also adds parameters, which
            `WeightVersions` detects.
    """

    def __init__(self, model: Any) -> None:
        self._layers = [(name, each) for name, each in model.named_modules() if hasattr(each, "merged_adapters")]

    def describe_active(self) -> str:
        """Describe which adapters are active in which layers, and how strongly; empty without any layer."""
        described = [
            (name, tuple(each.active_adapters), each.disable_adapters, tuple(each.merged_adapters), _scaling(each))
            for name, each in self._layers
        ]
        return repr(described) if described else ""


def _scaling(layer: Any) -> tuple[tuple[str, float], ...]:
    return tuple(getattr(layer, "scaling", {}).items())
