#include "launch/fork_mutex.h"

#include <pthread.h>

#include <algorithm>
#include <vector>

namespace foo {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<ForkMutex*> members;
};

Registry& registry();

// The youngest first, as what it guards may lock older ones.
void before_fork() {
  registry().mutex.lock();
  auto& members = registry().members;
  std::for_each(members.rbegin(), members.rend(), [](ForkMutex* each) { each->lock(); });
}

void after_fork() {
  for (ForkMutex* each : registry().members) each->unlock();
  registry().mutex.unlock();
}

// Never destroyed, as other static objects have such mutexes.
Registry& registry() {
  static auto* instance = [] {
    pthread_atfork(&before_fork, &after_fork, &after_fork);
    return new Registry();
  }();
  return *instance;
}

}  // namespace

ForkMutex::ForkMutex() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().members.push_back(this);
}

ForkMutex::~ForkMutex() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  auto& members = registry().members;
  members.erase(std::find(members.begin(), members.end(), this));
}

}  // namespace foo
