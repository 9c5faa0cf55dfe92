#include "launch/all_operators.h"

#include <memory>

namespace foo {
namespace {

class OperatorList final : public c10::OpRegistrationListener {
 public:
  explicit OperatorList(std::vector<c10::OperatorHandle>& operators) : operators_(operators) {}

  void onOperatorRegistered(const c10::OperatorHandle& op) override { operators_.push_back(op); }
  void onOperatorDeregistered(const c10::OperatorHandle&) override {}

 private:
  std::vector<c10::OperatorHandle>& operators_;
};

}  // namespace

std::vector<c10::OperatorHandle> all_operators() {
  std::vector<c10::OperatorHandle> operators;
  // A new listener hears of all at once. The dispatcher's list of their names would have to be
  // copied, and each of them looked up.
  const auto registration = c10::Dispatcher::singleton().addRegistrationListener(
      std::make_unique<OperatorList>(operators));
  return operators;
}

}  // namespace foo
