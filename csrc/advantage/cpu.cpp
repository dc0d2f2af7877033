#include "../common/parallel.h"
#include "group.h"

namespace megarl {

void group_advantage_cpu(const GroupAdvantageArgs& args, int threads) {
  parallel_for(args.batch, 16 * args.columns, threads, [&](int64_t i) { group_at(args, i); });
}

}  // namespace megarl
