"""Compiling our kernels leaves LLVM's options for all other code unchanged."""

import llvmlite.binding as llvm
import torch

from foo_ops import library
from foo_ops.kernels.compiler import emit


def loop_with_a_branch(size):
    """Make a function with a loop of ``size`` additions and a loop-invariant branch."""
    sums = "\n".join(f"  %x{i + 1} = fadd float %x{i}, 1.0" for i in range(size))
    return f"""
define void @f(ptr noalias %source, ptr noalias %target, i1 %is_first, i64 %count) {{
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %end]
  %from = getelementptr float, ptr %source, i64 %i
  %x0 = load volatile float, ptr %from
{sums}
  br i1 %is_first, label %first, label %second
first:
  store volatile float %x{size}, ptr %target
  br label %end
second:
  %to = getelementptr float, ptr %target, i64 %i
  store volatile float %x{size}, ptr %to
  br label %end
end:
  %next = add i64 %i, 1
  %is_done = icmp eq i64 %next, %count
  br i1 %is_done, label %out, label %loop
out:
  ret void
}}
"""


def loops(size):
    """Return the number of loops that LLVM makes of it, with the current options."""
    llvm.initialize_native_target()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=3)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    module = llvm.parse_assembly(loop_with_a_branch(size))
    passes.getModulePassManager().run(module, passes)
    return str(module).count("load volatile float")


def test_options_of_llvm_hold_for_our_kernels_alone(monkeypatch, tmp_path):
    """Numba's other functions in the process compile as without us, before and after."""
    monkeypatch.setenv("FOO_CACHE_DIR", str(tmp_path))
    seen = []

    def recorded(module):
        seen.append([loops(size) for size in (20, 90, 300)])

    library.define("foo_emit::f", "(Tensor input) -> Tensor")
    library.register_kernel("foo_emit::f", "cpu", library.elementwise_kernel(lambda x: x + 1))
    before = [loops(size) for size in (20, 90, 300)]
    with emit._our_options():
        inside = [loops(size) for size in (20, 90, 300)]
    monkeypatch.setattr(emit, "_check_symbols", recorded)
    torch.ops.foo_emit.f(torch.ones(3))
    assert (before, inside) == ([2, 1, 1], [2, 2, 1])
    assert seen == [before], "compiled once, and as before after that"
