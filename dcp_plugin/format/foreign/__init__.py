"""Checkpoints of other tools, read like our own: each format becomes an index, and the rest of a load is the same.

========================  ==========================================================================================
what it is                how it is recognised
========================  ==========================================================================================
safetensors               8 bytes of length and a JSON header; a directory with one, or with an index of shards
``torch.save``            a zip with a ``data.pkl``; also ``pytorch_model.bin``, alone or as an index of shards
Lightning's ``.ckpt``     a ``torch.save`` file with ``pytorch-lightning_version``
Accelerate's folder       ``pytorch_model_fsdp_0/``, ``pytorch_model_fsdp.bin``, or ``model.safetensors``
Lightning's directory     ``.metadata``, and a ``meta.pt`` with ``pytorch-lightning_version``
========================  ==========================================================================================

The contents decide, never a suffix. The model is found under ``model.`` (several: ``model_0.``, ``model_1.``), as in
our own checkpoints. Nothing is executed, no payload is read before it is asked for, and nothing lies outside of the
files that the directory itself lists. These may be links that lead elsewhere: a snapshot in the cache of the Hugging
Face hub consists of links into ``../../blobs``. The person who named the directory trusts its links; what an index
*inside* of it names has to be a plain name in it.
"""
