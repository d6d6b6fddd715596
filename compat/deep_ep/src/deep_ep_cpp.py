"""The name that DeepEP's compiled part had before 2.0; XTuner imports it."""

from deep_ep._C import Config, EventHandle, topk_idx_t

__all__ = ["Config", "EventHandle", "topk_idx_t"]
