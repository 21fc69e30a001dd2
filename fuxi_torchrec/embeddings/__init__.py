"""The only box that knows TorchRec: tables, sharding plan, EventBatch to KeyedJaggedTensor, item rows."""
