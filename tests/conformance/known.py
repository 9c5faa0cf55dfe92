"""Cases that cannot pass, by (suite, name) or (suite, name, dtype), and why."""

_AS_ON_CPU = "torch's fake tensors differ from the results on the CPU, too: "
_AT_INFERENCE = "torch's decomposition has no statistics at inference on the CPU alone"
_COMPRESSED = "torch makes no fake of a compressed sparse tensor outside of the CPU"

KNOWN: dict[tuple[str, ...], str] = {
    ("strides", "_native_batch_norm_legit"): _AT_INFERENCE,
    ("strides", "native_batch_norm"): _AT_INFERENCE,
    ("strides", "diff"): _AS_ON_CPU + "one element of a strided tensor",
    ("strides", "einsum"): _AS_ON_CPU + "a dimension of size 1",
    ("strides", "nn.functional.channel_shuffle"): _AS_ON_CPU + "channels_last",
    ("strides", "nn.functional.max_unpool2d"): _AS_ON_CPU + "channels_last",
    ("strides", "nn.functional.max_unpool2d.grad"): _AS_ON_CPU + "channels_last",
    ("strides", "nn.functional.rms_norm"): _AS_ON_CPU + "a tensor without elements",
    ("strides", "sparse.mm.reduce"): _COMPRESSED,
    ("strides", "sparse.sampled_addmm"): _COMPRESSED,
    ("strides", "tensor_split"): "torch reads the indices, and fake tensors have none",
}
