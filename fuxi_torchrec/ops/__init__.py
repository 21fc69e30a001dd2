"""Pure tensor functions: the parallel definition, the chunkwise form, the recurrent step. No modules, no I/O.

Every channel of the encoder is causal linear attention with a scalar decay per head,

    y_i = Σ_{j≤i} r^{query_clock_i − key_clock_j} (q_i·k_j) v_j,

over the events of one user. ``parallel`` is that definition, ``recurrent`` computes it one event at a time,
``retention``, ``positional`` and ``temporal`` compute it chunk by chunk, each with the structure of its channel.

All forms carry the same state S (B, H, K, V): what the events so far contribute, decayed to the clock of the user's
next event, S = Σ_j r^{next − key_clock_j} k_jᵀ v_j.

Shape suffixes: T events of all users, B users, N chunks, A those with a state before them, C events a chunk, H heads, K
key width, V value width, D model width; G the 2H temporal sub-heads, L blocks, M distinct positions, R table rows, X
any further dimensions.
"""
