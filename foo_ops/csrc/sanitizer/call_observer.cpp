#include "sanitizer/call_observer.h"

#include <memory>
#include <mutex>
#include <unordered_map>

#include "aten/observed_operators.h"
#include "launch/fork_mutex.h"
#include "sanitizer/sanitizer.h"

namespace foo::sanitizer {
namespace {

// Reading a schema takes longer than most calls.
const OperatorUses& uses_of(const c10::OperatorHandle& op) {
  static auto* mutex = new ForkMutex();
  static auto* known = new std::unordered_map<c10::OperatorName, std::unique_ptr<OperatorUses>>();
  const std::lock_guard lock(*mutex);
  std::unique_ptr<OperatorUses>& uses = (*known)[op.operator_name()];
  if (uses == nullptr) uses = std::make_unique<OperatorUses>(op);
  return *uses;
}

// What consists of other operators is seen when it calls them.
bool runs_on_cpu(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || op.schema().name() == "aten::copy_";
}

class Observer final : public aten::CallObserver {
 public:
  void around_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                       c10::function_ref<void()> run) override {
    sanitizer().call(uses_of(op), stack, run);
  }

  // Of its inputs, what is written is not known.
  aten::Tensors around_graph(const aten::Tensors& inputs,
                             c10::function_ref<aten::Tensors()> run) override {
    OperatorUses uses;
    uses.name = "compiled graph";
    uses.arguments = {{Reads::kNothing, true, false}};
    uses.results = {ResultUse::kNew};
    aten::Tensors results;
    std::vector<c10::IValue> boxed;
    sanitizer().call(
        uses, {c10::IValue(inputs)}, [&] { results = run(); },
        [&]() -> c10::ArrayRef<c10::IValue> {
          boxed = {c10::IValue(results)};
          return boxed;
        });
    return results;
  }

  bool sees_all_devices() override { return sanitizer().watches_host(); }

  void before_operator(const c10::OperatorHandle& op, const at::RecordFunction& call) override {
    if (!runs_on_cpu(op)) return;
    const OperatorUses& uses = uses_of(op);
    if (call.inputs().size() == uses.arguments.size()) {
      sanitizer().call_on_cpu(uses, call.inputs());
    }
  }
};

}  // namespace

void observe_operators() {
  static auto* observer = new Observer();
  aten::add_call_observer(aten::Observing::kSanitizer, *observer);
}

void stop_observing_operators() {
  aten::remove_call_observer(aten::Observing::kSanitizer);
}

}  // namespace foo::sanitizer
