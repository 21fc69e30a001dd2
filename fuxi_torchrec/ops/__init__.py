"""Pure tensor functions: the parallel definition, the chunkwise form, the recurrent step. No modules, no I/O."""
