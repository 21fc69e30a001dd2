"""States of users together with their windows, where scores have a bias for items of these."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuxi_torchrec.encoders.state import EncoderState, States, user_index
from fuxi_torchrec.tasks.window_state import WindowState


@dataclass(frozen=True, eq=False)
class WindowedStates:
    """Of B users; never changed in place."""

    encoded: States
    windows: WindowState

    def __len__(self) -> int:
        return len(self.encoded)

    @property
    def fingerprint(self) -> int:
        return self.encoded.fingerprint

    @property
    def count(self) -> Tensor:
        return self.encoded.count

    @property
    def last_time(self) -> Tensor:
        return self.encoded.last_time

    @property
    def sample(self) -> Tensor:
        return self.encoded.sample

    @property
    def nbytes(self) -> int:
        return self.encoded.nbytes + self.windows.nbytes

    def select(self, users: Tensor | Sequence[int]) -> "WindowedStates":
        index = user_index(users, len(self), self.windows.items.device)
        return WindowedStates(self.encoded.select(index), self.windows.select(index))

    def to(self, device: torch.device | str) -> "WindowedStates":
        """The encoder's part; windows stay on the host."""
        return WindowedStates(self.encoded.to(device), self.windows)

    @staticmethod
    def concatenate(states: Sequence["WindowedStates"]) -> "WindowedStates":
        encoded = states[0].encoded.concatenate([state.encoded for state in states])
        return WindowedStates(encoded, WindowState.concatenate([state.windows for state in states]))

    def to_bytes(self) -> Tensor:
        """Of states of constant size: records of these, each with its window behind it."""
        assert isinstance(self.encoded, EncoderState)
        return torch.cat([self.encoded.to_bytes(), self.windows.to_bytes()], dim=1)
