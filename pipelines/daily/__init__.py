"""The production loop: a day's log to a published export, each stage a TorchX job (docs/daily.md)."""
