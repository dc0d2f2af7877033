// The scheduler of the emulator, and the CUDA runtime's functions.
#include "simt.h"

namespace simt {

namespace {

std::string at(const uint3& i) {
  return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) + ")";
}

// "0-31, 40" of a list of ranks in rising order.
std::string ranges(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0, last; i < ranks.size(); i = last + 1) {
    for (last = i; last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1;) ++last;
    text += (i ? ", " : "") + std::to_string(ranks[i]);
    if (last > i) text += "-" + std::to_string(ranks[last]);
  }
  return text;
}

#ifdef __SANITIZE_ADDRESS__
const void* host_stack;
size_t host_stack_bytes;
#endif

void leave_for(const void* stack, size_t bytes, void** fake) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(fake, stack, bytes);
#else
  (void)stack, (void)bytes, (void)fake;
#endif
}

void arrive_in_fiber(void* fake) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, &host_stack, &host_stack_bytes);
#else
  (void)fake;
#endif
}

void arrive_in_scheduler(void* fake) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  (void)fake;
#endif
}

void leave_for_scheduler(void** fake) {
#ifdef __SANITIZE_ADDRESS__
  leave_for(host_stack, host_stack_bytes, fake);
#else
  (void)fake;
#endif
}

void fiber_main() {
  arrive_in_fiber(nullptr);
  for (;;) {
    machine.body(machine.arguments);
    machine.current->state = State::kEnded;
    machine.yield();
  }
}

}  // namespace

// Gives the fiber a stack with an inaccessible page below it.
void Machine::give_stack(Fiber& fiber) {
  constexpr size_t kPage = 4096;
  void* memory =
      mmap(nullptr, kStackBytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kPage, PROT_NONE);
  fiber.stack = static_cast<char*>(memory) + kPage;
}

void Machine::start(Fiber& fiber) {
  fiber.started = true;
  static ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, fiber_main, 0);
  setcontext(&context);
}

void Machine::resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.index;
  if (!fiber.stack) give_stack(fiber);
  void* fake = nullptr;
  if (!_setjmp(scheduler)) {
    leave_for(fiber.stack, kStackBytes, &fake);
    if (fiber.started) _longjmp(fiber.context, 1);
    start(fiber);
  }
  arrive_in_scheduler(fake);
  if (!failure.empty()) throw std::runtime_error(failure);
}

void Machine::yield() {
  void* fake = nullptr;
  if (!_setjmp(current->context)) {
    leave_for_scheduler(&fake);
    _longjmp(scheduler, 1);
  }
  arrive_in_fiber(fake);
}

void Machine::fail(const std::string& text) {
  failure = text + ", in kernel " + kernel + ", block " + at(blockIdx) + ", thread " + at(threadIdx);
  yield();
  abort();  // a failed block is never resumed
}

std::vector<int> Machine::ordered(int begin, int end) {
  std::vector<int> items(end - begin);
  std::iota(items.begin(), items.end(), begin);
  if (order == Order::kDescending) std::reverse(items.begin(), items.end());
  if (order == Order::kRandom) std::shuffle(items.begin(), items.end(), random);
  return items;
}

void Machine::run_grid(dim3 grid, dim3 block) {
  failure.clear();
  shared.clear();
  gridDim = grid;
  blockDim = block;
  threads = static_cast<int>(block.x * block.y * block.z);
  if (fibers.empty()) fibers.resize(kMaxThreads);
  for (int block_rank : ordered(0, static_cast<int>(grid.x * grid.y * grid.z))) {
    const unsigned rank = static_cast<unsigned>(block_rank);
    blockIdx = {rank % grid.x, rank / grid.x % grid.y, rank / grid.x / grid.y};
    for (Shared& s : shared) memset(s.memory.get() + kGuardBytes, poison, s.bytes);
    try {
      run_block();
    } catch (...) {
      for (Fiber& fiber : fibers) fiber.started = false;  // their frames stay where the block stopped
      throw;
    }
    end_of_block();
  }
  launches.push_back({kernel, device});
}

void Machine::run_block() {
  for (int i = 0; i < threads; ++i) {
    const unsigned rank = static_cast<unsigned>(i);
    fibers[i].index = {rank % blockDim.x, rank / blockDim.x % blockDim.y, rank / blockDim.x / blockDim.y};
    fibers[i].rank = i;
    fibers[i].state = State::kReady;
  }
  const auto ended = [](const Fiber& f) { return f.state == State::kEnded; };
  for (;;) {
    bool progress = false;
    for (int warp : ordered(0, (threads + kWarpSize - 1) / kWarpSize)) progress |= run_warp(warp);
    progress |= release_block();
    if (std::all_of(fibers.begin(), fibers.begin() + threads, ended)) return;
    if (!progress) throw std::runtime_error(divergence());
  }
}

// Runs a warp until it waits for others; in random order, often no further than to its next collective.
bool Machine::run_warp(int warp) {
  bool progress = false, ran = true;
  while (ran) {
    ran = false;
    for (int i : ordered(warp * kWarpSize, std::min(threads, (warp + 1) * kWarpSize))) {
      if (fibers[i].state != State::kReady) continue;
      resume(fibers[i]);
      ran = true;
    }
    release_warp(warp);
    progress |= ran;
    if (order == Order::kRandom && random() % 2) break;
  }
  return progress;
}

// Completes the collectives at which all lanes of a mask have arrived.
void Machine::release_warp(int warp) {
  Fiber* lanes = &fibers[warp * kWarpSize];
  const int count = std::min(kWarpSize, threads - warp * kWarpSize);
  for (int i = 0; i < count; ++i) {
    if (lanes[i].state != State::kAtWarpBarrier) continue;
    const unsigned mask = lanes[i].mask;
    unsigned arrived = 0, ballot = 0;
    for (int j = 0; j < count; ++j) {
      const Fiber& f = lanes[j];
      if (f.state != State::kAtWarpBarrier || f.mask != mask || !(f.barrier == lanes[i].barrier)) continue;
      arrived |= 1u << j;
      ballot |= static_cast<unsigned>(f.value & 1) << j;
    }
    if (arrived != mask) continue;
    for (int j = 0; j < count; ++j) {
      if (!(mask >> j & 1)) continue;
      const int source = lanes[j].source;
      const bool named = source >= 0 && (mask >> source & 1);  // a lane outside of the mask gives no value
      lanes[j].result = source < 0 ? ballot : named ? lanes[source].value : ~uint64_t{0};
    }
    for (int j = 0; j < count; ++j)
      if (mask >> j & 1) lanes[j].state = State::kReady;
  }
}

bool Machine::release_block() {
  for (int i = 0; i < threads; ++i)
    if (fibers[i].state != State::kAtBlockBarrier || !(fibers[i].barrier == fibers[0].barrier)) return false;
  for (int i = 0; i < threads; ++i) fibers[i].state = State::kReady;
  return true;
}

// Names a barrier that some threads wait at, and the threads that are missing there.
std::string Machine::divergence() const {
  const auto waits = [](const Fiber& f) { return f.state != State::kEnded; };
  const Fiber& first = *std::find_if(fibers.begin(), fibers.begin() + threads, waits);
  const int begin = first.state == State::kAtWarpBarrier ? first.rank / kWarpSize * kWarpSize : 0;
  std::vector<int> arrived, ended, elsewhere;
  std::string other;
  const int end = first.state == State::kAtWarpBarrier ? begin + kWarpSize : threads;
  for (int i = begin; i < end; ++i) {
    if (first.state == State::kAtWarpBarrier && !(first.mask >> (i - begin) & 1)) continue;
    if (i >= threads || fibers[i].state == State::kEnded) {
      ended.push_back(i);
    } else if (fibers[i].barrier == first.barrier && fibers[i].mask == first.mask) {
      arrived.push_back(i);
    } else {
      elsewhere.push_back(i);
      other = fibers[i].barrier.text();
    }
  }
  std::string text = std::string("divergent barrier in kernel ") + kernel + ", block " + at(blockIdx) + ": " +
                     first.barrier.text() + " has threads " + ranges(arrived);
  if (!ended.empty()) text += "; missing, because they ended: " + ranges(ended);
  if (!elsewhere.empty()) text += "; missing, because they wait for " + other + ": " + ranges(elsewhere);
  return text;
}

void Machine::meet_block(const Barrier& barrier) {
  current->state = State::kAtBlockBarrier;
  current->barrier = barrier;
  current->mask = 0;
  yield();
}

uint64_t Machine::meet_warp(const Barrier& barrier, unsigned mask, int source, uint64_t value) {
  Fiber& fiber = *current;
  if (!(mask >> fiber.rank % kWarpSize & 1))
    fail(barrier.text() + " is called by a lane that its mask does not name");
  fiber.state = State::kAtWarpBarrier;
  fiber.barrier = barrier;
  fiber.mask = mask;
  fiber.source = source;
  fiber.value = value;
  yield();
  return fiber.result;
}

void* Machine::shared_memory(const void* tag, const char* name, size_t bytes) {
  for (const Shared& s : shared)
    if (s.tag == tag) return s.memory.get() + kGuardBytes;
  size_t total = bytes;
  for (const Shared& s : shared) total += s.bytes;
  if (total > kSharedBytes) fail(std::string("more than 48 KiB of shared memory with ") + name);
  shared.push_back({tag, name, bytes, std::make_unique<char[]>(bytes + 2 * kGuardBytes)});
  char* memory = shared.back().memory.get();
  memset(memory, 0xff, bytes + 2 * kGuardBytes);
  memset(memory + kGuardBytes, poison, bytes);
  return memory + kGuardBytes;
}

void Machine::end_of_block() {
  for (const Shared& s : shared) {
    const char* memory = s.memory.get();
    for (size_t i = 0; i < kGuardBytes; ++i)
      if (memory[i] != '\xff' || memory[kGuardBytes + s.bytes + i] != '\xff')
        throw std::runtime_error(std::string("kernel ") + kernel + ", block " + at(blockIdx) +
                                 ": writes outside of the shared variable " + s.name);
  }
}

}  // namespace simt

cudaError_t cudaGetLastError() {
  return std::exchange(simt::machine.error, cudaSuccess);
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    default:
      return "no error";
  }
}

cudaError_t cudaGetDevice(int* device) {
  *device = simt::machine.device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= simt::kDevices) return cudaErrorInvalidDevice;
  simt::machine.device = device;
  return cudaSuccess;
}
