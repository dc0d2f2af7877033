#include "../common/parallel.h"
#include "position.h"

namespace megarl {

void index_build_cpu(const IndexArgs& args, int threads) {
  parallel_for(args.local, 8, threads, [&](int64_t i) { place_token(args, i); });
  int64_t count = 0;
  for (int64_t i = 0; i < args.local; ++i)
    if (args.labels[i] >= 0) args.rows[count++] = i;
  args.row_count[0] = count;
  for (; count < args.local; ++count) args.rows[count] = -1;
}

}  // namespace megarl
