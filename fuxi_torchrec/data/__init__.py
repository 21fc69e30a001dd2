"""Parquet to EventBatch, plain tensors: schema, vocabulary, reader, batching, splits. Never TorchRec."""
