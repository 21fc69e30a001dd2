"""User states, index, refresh, Recommender. Needs torch, pyarrow and faiss; never TorchRec, never training."""
