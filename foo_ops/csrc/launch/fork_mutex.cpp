#include "launch/fork_mutex.h"

#include <pthread.h>

#include <algorithm>
#include <vector>

namespace foo {
namespace {

struct Mutexes {
  std::mutex mutex;
  std::vector<ForkMutex*> members;
};

Mutexes& mutexes();

// Lock the youngest first: the code that it guards may lock older ones.
void before_fork() {
  mutexes().mutex.lock();
  auto& members = mutexes().members;
  std::for_each(members.rbegin(), members.rend(), [](ForkMutex* each) { each->lock(); });
}

void after_fork() {
  for (ForkMutex* each : mutexes().members) each->unlock();
  mutexes().mutex.unlock();
}

// Never destroyed: other static objects contain such mutexes.
Mutexes& mutexes() {
  static auto* instance = [] {
    pthread_atfork(&before_fork, &after_fork, &after_fork);
    return new Mutexes();
  }();
  return *instance;
}

}  // namespace

ForkMutex::ForkMutex() {
  const std::lock_guard<std::mutex> lock(mutexes().mutex);
  mutexes().members.push_back(this);
}

ForkMutex::~ForkMutex() {
  const std::lock_guard<std::mutex> lock(mutexes().mutex);
  auto& members = mutexes().members;
  members.erase(std::find(members.begin(), members.end(), this));
}

}  // namespace foo
