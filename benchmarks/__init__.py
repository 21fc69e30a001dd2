"""Speed and memory: each program checks its results, then prints ratios measured in one run."""
