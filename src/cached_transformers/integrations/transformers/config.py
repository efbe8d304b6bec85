"""The config of a model with a memory, as `record.py` writes it: of the type "cached_transformers", with the host's own
config inside. Without this package transformers refuses it by that name, and does not load the host alone.

Importing this module tells transformers of the type.
"""

from __future__ import annotations

from typing import Any

try:
    from transformers.configuration_utils import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
except ImportError:  # this module is of use to those alone who have transformers, but imports without it
    PretrainedConfig = object


class CachedConfig(PretrainedConfig):  # type: ignore[misc]
    """The config of a model with a memory.

    Args:
        host_type: its model type in transformers.
        host: the host's own config, as it would be saved, with what `add_memory` was told in `cached_transformers`.
    """

    model_type = "cached_transformers"

    def __init__(self, host_type: str = "", host: dict[str, Any] | None = None, **others: Any) -> None:
        self.host_type, self.host = host_type, dict(host or {})
        super().__init__(**others)

    def host_config(self) -> Any:
        """The host's config, of its own class.

        Raises:
            ValueError: transformers does not know the type of the host.
        """
        if self.host_type not in CONFIG_MAPPING:
            raise ValueError(
                f"the model with a memory is a host of type {self.host_type!r}, which this transformers does not know"
            )
        return CONFIG_MAPPING[self.host_type].from_dict(self.host)


if PretrainedConfig is not object:
    AutoConfig.register(CachedConfig.model_type, CachedConfig, exist_ok=True)
