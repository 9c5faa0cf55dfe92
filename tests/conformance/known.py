"""Cases that cannot pass, by (suite, name) or (suite, name, dtype), each with its reason."""

_AS_ON_CPU = "torch's fake tensors differ from the results on the CPU, too: "
_AT_INFERENCE = "torch's decomposition has no statistics at inference on the CPU alone"
_COMPRESSED = "torch makes no fake of a compressed sparse tensor outside of the CPU"
_SHAPE_ALONE = "as on CUDA: only the shape or the device of the other tensor is used"
_COPIED = "as on CUDA: the source is copied, which goes between devices"
_INDICES = "as on CUDA: indices may be on the CPU"
_OVERFLOW = "as on CUDA: the formula of the gradient overflows in half precision"

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
    **{
        ("devices", name): _SHAPE_ALONE
        for name in (
            "atleast_1d",
            "atleast_2d",
            "atleast_3d",
            "broadcast_tensors",
            "expand_as",
            "resize_as_",
            "reshape_as",
            "to",
            "view_as",
        )
    },
    **{
        ("devices", f"{name}_scatter"): _COPIED
        for name in ("as_strided", "diagonal", "select", "slice")
    },
    **{
        ("devices", name): _INDICES
        for name in (
            "__getitem__",
            "_unsafe_masked_index",
            "_unsafe_masked_index_put_accumulate",
            "index_put",
        )
    },
    ("dtypes", "logaddexp", "complex32"): _OVERFLOW,
    ("dtypes", "pow", "complex32"): _OVERFLOW,
    ("devices", "diff"): "as on CUDA: differences of order zero use one tensor",
    ("devices", "nn.functional.ctc_loss"): "as on CUDA: torch moves targets and lengths",
}
