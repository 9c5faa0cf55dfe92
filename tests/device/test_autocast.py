"""torch.autocast("foo") casts the operators of torch.autocast("cuda"), in the same way."""

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastTestLists, TestAutocast

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture
def lists():
    torch.manual_seed(0)
    return AutocastTestLists("foo")


def has_kernel(name, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_operators_are_those_of_cuda():
    """torch registers CUDA's lists in every build."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    cuda, foo = (
        {name for name in names if has_kernel(name, f"Autocast{backend}")}
        for backend in ("CUDA", "PrivateUse1")
    )
    assert len(foo) > 100
    assert foo <= cuda
    assert {name for name in cuda - foo if "cudnn" not in name} == set()


# For each of torch's lists: the module with the operators, and the dtype they run in; None is
# autocast's own dtype.
LISTS = {
    "torch_fp16": (torch, None),
    "torch_fp32": (torch, torch.float32),
    "torch_need_autocast_promote": (torch, torch.float32),
    "nn_fp16": (torch._C._nn, None),
    "nn_fp32": (torch._C._nn, torch.float32),
    "linalg_fp16": (torch._C._linalg, None),
    "methods_fp16": (None, None),
    "methods_fp32": (None, torch.float32),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in LISTS
        # That list has float16 and float32 tensors.
        for dtype in (DTYPES if "promote" not in name else (torch.float16,))
    ],
    ids=str,
)
def test_lists(lists, name, dtype):
    module, runs_in = LISTS[name]
    case = TestAutocast()
    checked = 0
    for operator, arguments, *rest in getattr(lists, name):
        keywords = next((each for each in rest if isinstance(each, dict)), {})
        # torch's own test skips operators with other entries.
        if operator.startswith("cudnn_") or rest not in ([], [keywords]):
            continue
        case._run_autocast_outofplace(
            operator,
            arguments,
            runs_in or dtype,
            "foo",
            module=module,
            add_kwargs=keywords,
            amp_dtype=dtype,
        )
        checked += 1
    assert checked > 0


@pytest.mark.parametrize("name", ["torch", "methods"])
def test_promotion_that_operators_bring_themselves(lists, name):
    for operator, arguments, result_type in getattr(lists, f"{name}_expect_builtin_promote"):
        TestAutocast()._run_autocast_outofplace(
            operator,
            arguments,
            torch.float32,
            "foo",
            module=torch if name == "torch" else None,
            out_type=result_type,
            amp_dtype=torch.float16,
        )


def test_banned(lists):
    message = "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast"
    for operator, arguments, module in lists.banned:
        with torch.autocast("foo"), pytest.raises(RuntimeError, match=message):
            getattr(module, operator)(*arguments)
        with torch.autocast("foo", enabled=False):
            getattr(module, operator)(*arguments)
