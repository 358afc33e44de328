#include "step_rows.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "array_index.h"
#include "hash_index.h"
#include "merge.h"
#include "parallel.h"

namespace shardam {
namespace {

constexpr std::int64_t kLeastRows = 512;      // of a part: to look them up takes about as long as waking a thread
constexpr std::int64_t kLeastFloats = 1 << 14;  // of a part that is searched for its largest magnitude, 64 KiB
constexpr std::int64_t kColumns = 512;        // of a row at a time: they stay in L1

// Whether a row's merged, unscaled gradient must be refused.
SHARDAM_CLONES bool is_bad(const StepGradients& step, std::int64_t row) {
  float sum[kColumns];
  for (std::int64_t at = 0; at < step.dim; at += kColumns) {
    const std::int64_t size = std::min(kColumns, step.dim - at);
    if (is_refused(largest_of(merge_row<false>(step, row, at, size, sum), size))) return true;
  }
  return false;
}

}  // namespace

StepRows::StepRows(const std::int64_t* row_ids, const float* gradients, std::int64_t count, std::int64_t dim, float unscale,
                   float divisor, int num_threads)
    : row_ids_(row_ids), count_(count), gradients_{gradients, nullptr, nullptr, dim, unscale, divisor} {
  const std::int64_t num_floats = count * dim;
  const int threads = useful_threads(num_threads, num_floats * std::int64_t{sizeof(float)}, kMinBytesPerThread);
  const std::int64_t parts = useful_parts(threads, num_floats, kLeastFloats);
  std::atomic<std::uint32_t> peak{0};
  std::atomic<bool> has_failed{false};
  // One thread finds the runs while the others bring the gradients into the caches.
  run_parts(threads, parts + 1, [&](int part) {
    if (part == 0) {
      try {
        chains_ = chain_ids(row_ids, count);
      } catch (const std::bad_alloc&) {
        has_failed = true;
      }
      return;
    }
    const std::int64_t first = num_floats * (part - 1) / parts;
    raise_to(peak, largest_of(gradients + first, num_floats * part / parts - first));
  });
  if (has_failed) throw std::bad_alloc();
  if (!all_distinct()) {
    gradients_.first = chains_.first.data();
    gradients_.next = chains_.next.data();
  }
  if (!sums_stay_below_limit(peak, chains_.longest, unscale)) check(threads);
}

void StepRows::check(int num_threads) {
  const Buffer<std::uint8_t> bad(num_rows());
  const std::int64_t parts = useful_parts(num_threads, num_rows(), 1);
  run_parts(num_threads, parts, [&](int part) {
    for (std::int64_t row = num_rows() * part / parts; row < num_rows() * (part + 1) / parts; ++row) {
      bad[row] = is_bad(gradients_, row);
    }
  });
  for (std::int64_t row = 0; row < num_rows(); ++row) {
    if (bad[row] != 0) bad_rows_.push_back(row);
  }
}

template <class Index>
std::int64_t StepRows::find(const Index& index, int num_threads) {
  if (slots_.size() != num_rows()) slots_ = Buffer<std::int64_t>(num_rows());
  index.check(row_ids(), num_rows());
  const int threads = useful_threads(num_threads, num_rows(), kLeastRows);
  const std::int64_t parts = useful_parts(threads, num_rows(), kLeastRows);
  std::atomic<std::int64_t> found{0};
  run_parts(threads, parts, [&](int part) {
    const std::int64_t first = num_rows() * part / parts, end = num_rows() * (part + 1) / parts;
    found += index.lookup_checked(row_ids() + first, end - first, slots_.data() + first);
  });
  num_absent_ = num_rows() - found;
  return num_absent_;
}

template <class Index>
std::vector<std::int64_t> StepRows::insert(Index& index) {
  std::vector<std::int64_t> places, absent;
  for (std::int64_t row = 0; row < num_rows(); ++row) {
    if (slots_[row] != kNoSlot) continue;
    places.push_back(row);
    absent.push_back(row_ids()[row]);
  }
  const auto count = static_cast<std::int64_t>(absent.size());
  const Buffer<std::int64_t> slots(count);
  const Buffer<std::uint8_t> is_new(count);
  index.insert(absent.data(), count, slots.data(), is_new.data());
  for (std::int64_t i = 0; i < count; ++i) slots_[places[i]] = slots[i];
  num_absent_ = 0;
  return places;
}

template std::int64_t StepRows::find(const HashIndex&, int);
template std::int64_t StepRows::find(const ArrayIndex&, int);
template std::vector<std::int64_t> StepRows::insert(HashIndex&);
template std::vector<std::int64_t> StepRows::insert(ArrayIndex&);

}  // namespace shardam
