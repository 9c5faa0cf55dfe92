// Times of foo kernels for torch.profiler, in the form that Kineto takes from devices.
//
// Each operator is done when it returns, so its kernel's time on the device is the host's time in
// it.

#define FMT_HEADER_ONLY
#define USE_KINETO

#include <c10/util/ApproximateClock.h>
#include <libkineto.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "aten/observers.h"
#include "aten/operator_kinds.h"
#include "device/device.h"
#include "launch/fork_mutex.h"

namespace foo::profiling {
namespace {

using libkineto::ActivityType;

struct KernelTime {
  std::string name;
  int64_t begin;
  int64_t end;
  c10::Stream stream;
  // Id of the operator in the CPU's trace; 0 if there is none.
  uint64_t correlation;
};

// Kineto's ids of the operators that this thread is in.
thread_local std::vector<uint64_t> correlations;

// Operators inside an operator belong to its kernel.
thread_local bool is_in_kernel = false;

class Clock final : public aten::CallObserver {
 public:
  void around_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                       c10::function_ref<void()> run) override {
    if (is_part() || aten::touches_no_bytes(op)) return run();
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    time(op.schema().name(), aten::stream_of_call(arguments), run);
  }

  aten::Tensors around_graph(const aten::Tensors& inputs,
                             c10::function_ref<aten::Tensors()> run) override {
    if (is_part()) return run();
    aten::Tensors results;
    const std::vector<c10::IValue> arguments{c10::IValue(inputs)};
    time("compiled graph", aten::stream_of_call(arguments), [&] { results = run(); });
    return results;
  }

  std::vector<KernelTime> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(times_, {});
  }

 private:
  // A capture launches no kernels.
  static bool is_part() { return is_in_kernel || aten::InCapturedOperator::is_there(); }

  void time(const std::string& name, c10::Stream stream, c10::function_ref<void()> run) {
    struct InKernel {
      InKernel() { is_in_kernel = true; }
      ~InKernel() { is_in_kernel = false; }
    };
    const int64_t begin = c10::getTime();
    {
      const InKernel scope;
      run();
    }
    const int64_t end = c10::getTime();
    const uint64_t correlation = correlations.empty() ? 0 : correlations.back();
    const std::lock_guard lock(mutex_);
    times_.push_back({"kernel of " + name, begin, end, stream, correlation});
  }

  ForkMutex mutex_;
  std::vector<KernelTime> times_;
};

Clock& clock_of_kernels() {
  static auto* instance = new Clock();
  return *instance;
}

class Session final : public libkineto::IActivityProfilerSession {
 public:
  void start() override {
    clock_of_kernels().take();
    aten::add_call_observer(aten::Observing::kProfiler, clock_of_kernels());
    status_ = libkineto::TraceStatus::RECORDING;
  }

  void stop() override {
    aten::remove_call_observer(aten::Observing::kProfiler);
    times_ = clock_of_kernels().take();
    status_ = libkineto::TraceStatus::PROCESSING;
  }

  std::vector<std::string> errors() override { return {}; }

  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, 0);
  }

  void processTrace(libkineto::ActivityLogger& logger,
                    libkineto::getLinkedActivityCallback linked_activity, int64_t begin,
                    int64_t end) override {
    trace_ = std::make_unique<libkineto::CpuTraceBuffer>();
    trace_->span = libkineto::TraceSpan(begin, end, "foo");
    trace_->gpuOpCount = static_cast<int>(times_.size());
    for (const KernelTime& time : times_) {
      trace_->emplace_activity(trace_->span, ActivityType::CONCURRENT_KERNEL, time.name);
      libkineto::GenericTraceActivity& activity = *trace_->activities.back();
      activity.startTime = time.begin;
      activity.endTime = time.end;
      activity.device = time.stream.device_index();
      activity.resource = static_cast<int32_t>(time.stream.id());
      activity.id = static_cast<int32_t>(time.correlation);
      activity.linked = linked_activity(activity.id);
      activity.log(logger);
    }
  }

  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(trace_); }

  void pushCorrelationId(uint64_t id) override { correlations.push_back(id); }
  void popCorrelationId() override {
    // The outermost may have begun before the session.
    if (!correlations.empty()) correlations.pop_back();
  }

 private:
  std::vector<KernelTime> times_;
  std::unique_ptr<libkineto::CpuTraceBuffer> trace_;
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override { return name_; }
  const std::set<ActivityType>& availableActivities() const override { return activities_; }

  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& wanted, const libkineto::Config&) override {
    if (wanted.count(ActivityType::CONCURRENT_KERNEL) == 0) return nullptr;
    return std::make_unique<Session>();
  }

  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<ActivityType>& wanted,
      const libkineto::Config& config) override {
    return configure(wanted, config);
  }

 private:
  const std::string name_ = "foo";
  const std::set<ActivityType> activities_ = {ActivityType::CONCURRENT_KERNEL};
};

REGISTER_PRIVATEUSE1_PROFILER(Profiler);

}  // namespace
}  // namespace foo::profiling
