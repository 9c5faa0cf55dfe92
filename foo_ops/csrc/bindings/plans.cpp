// Binds how launchers cut calls into jobs and hand these to threads, for tests and benchmarks that
// simulate threads.

#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "launch/jobs.h"

namespace py = pybind11;

namespace foo {

void bind_plans(py::module_& module) {
  py::class_<PlannedLoop>(module, "PlannedLoop")
      .def_readonly("costs", &PlannedLoop::costs)
      .def_readonly("has_chains", &PlannedLoop::has_chains)
      .def_readonly("threads", &PlannedLoop::threads);
  module.def("plan_of", [](const py::function& call) {
    const PlanRecorder recorder;
    call();
    return recorder.loops;
  });
  module.attr("WORK_OF_THREAD") = kWorkOfThread;
  py::class_<ThreadShares>(module, "ThreadShares")
      .def(py::init<int64_t, int64_t>(), py::arg("jobs"), py::arg("threads"))
      .def("take", &ThreadShares::take, py::arg("thread"));
  py::class_<JobChains>(module, "JobChains")
      .def(py::init<std::vector<std::vector<double>>, int64_t>(), py::arg("costs"),
           py::arg("threads"))
      .def(
          "take",
          [](JobChains& chains, int64_t thread) -> py::object {
            const auto job = chains.take(thread);
            if (!job.has_value()) return py::none();
            return py::make_tuple(job->chain, job->position);
          },
          py::arg("thread"));
}

}  // namespace foo
