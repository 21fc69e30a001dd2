"""Sequence encoders: the contract (base), the registry, and one folder or file each. Imports torch and ops only."""

from fuxi_torchrec.encoders.registry import config_class, encoder_class, from_official, kinds, make_encoder

__all__ = ["config_class", "encoder_class", "from_official", "kinds", "make_encoder"]
