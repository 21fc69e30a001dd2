"""The paper's experiments on sets that can be had: see ``__main__``."""
