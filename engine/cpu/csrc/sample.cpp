// Samples a token from each row of logits: grammar mask, temperature, filters, and the walk along the distribution, in
// one call and without changing the logits. Reference: `sample_scores` in engine/sampling/distribution.py, whose order,
// ties and random numbers these are.
//
// A row depends on nothing but itself. Its weights are probabilities up to a factor: the likeliest token has weight 1.
// The k-th largest weight and the edge of the nucleus are found by a histogram over the upper bits of the weights, and
// exactly within one bucket of it.
#include "simd.h"
#include "thread_team.h"

#include <functional>
#include <limits>

namespace {

constexpr int kBlock = 128;                  // neighbours in the vocabulary whose weights are summed at once
constexpr int kValuesPerTask = 1 << 14;      // below, waking a thread costs more than it saves
constexpr int kBucketShift = 20, kBuckets = (0x3f800000 >> kBucketShift) + 1;  // of weights up to 1
constexpr float kInfinity = std::numeric_limits<float>::infinity(), kMinTemperature = 1e-30f;

// `_Sampling` of engine/cpu/sampling.py has the same fields.
struct Sampling {
  const void* logits;  // rows of `vocab_size` values, `stride` values apart
  int64_t stride;
  const char* records;        // a request's parameters for each row, `record_bytes` apart
  const int64_t* positions;   // of each row's sampled token
  const uint32_t* masks;      // `mask_words` words each, a bit for each token, the lowest first
  const int64_t* mask_of_row; // null: no row has a mask; -1: this row has none
  int64_t* token_ids;
  uint8_t* valid;  // whether the distribution was finite
  int32_t num_rows, vocab_size, mask_words, is_bf16;
  int32_t record_bytes, is_greedy, temperature, top_k, top_p, min_p, seed;  // the last six: bytes to a record's fields
};

struct Parameters {
  bool is_greedy;
  double temperature, top_p, min_p;
  int64_t top_k;
  uint64_t seed;

  Parameters(const Sampling& all, int row) {
    const char* record = all.records + int64_t(row) * all.record_bytes;  // not aligned
    is_greedy = record[all.is_greedy];
    temperature = at<double>(record + all.temperature), top_k = at<int64_t>(record + all.top_k);
    top_p = at<double>(record + all.top_p), min_p = at<double>(record + all.min_p);
    seed = at<uint64_t>(record + all.seed);
  }

 private:
  template <class T> static T at(const char* from) {
    T value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
};

// The finalizer of SplitMix64; see engine/sampling/counter_random.py.
uint64_t mix(uint64_t value) {
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

double uniform(uint64_t seed, int64_t position) {
  return double(mix(mix(seed) + 0x9e3779b97f4a7c15u * uint64_t(position + 1)) >> 11) * 0x1p-53;
}

uint32_t bucket_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof(bits));
  return bits >> kBucketShift;
}

struct Scratch {
  Lines<float> weights;       // in whole blocks
  std::vector<double> ends;   // the running sum at the end of each block
  std::vector<float> bucket;  // the weights of one bucket
  int32_t counts[kBuckets];
  double sums[kBuckets];
};

class Row {
 public:
  Row(const Sampling& all, int row, Scratch& scratch)
      : all(all), scratch(scratch), row(row), vocab_size(all.vocab_size),
        num_blocks((all.vocab_size + kBlock - 1) / kBlock) {
    scratch.weights.resize(num_blocks * kBlock);
    scratch.ends.resize(num_blocks);
  }

  void sample() {
    if (all.is_bf16) read(static_cast<const uint16_t*>(all.logits) + row * all.stride);
    else read(static_cast<const float*>(all.logits) + row * all.stride);
    all.token_ids[row] = 0;
    all.valid[row] = !has_nan && std::abs(best) < kInfinity;
    if (!all.valid[row]) return;
    const Parameters parameters(all, row);
    if (parameters.is_greedy) {
      all.token_ids[row] = std::find(scratch.weights.begin(), scratch.weights.begin() + vocab_size, best) -
                           scratch.weights.begin();
      return;
    }
    weigh(std::max(float(parameters.temperature), kMinTemperature));
    filter(parameters);
    walk(uniform(parameters.seed, all.positions[row]));
  }

 private:
  const Sampling& all;
  Scratch& scratch;
  const int64_t row;
  const int vocab_size, num_blocks;
  float best = -kInfinity;
  bool has_nan = false;

  // Reads the logits, with minus infinity for masked tokens and the padding.
  template <class Stored> void read(const Stored* logits) {
    const int64_t mask = all.mask_of_row ? all.mask_of_row[row] : -1;
    const uint32_t* const words = mask < 0 ? nullptr : all.masks + mask * all.mask_words;
    float* const to = scratch.weights.data();
    const Words lane = (Words)lane_numbers();
    Floats most = splat(-kInfinity);
    Words nan{};
    int i = 0;
    for (; i < vocab_size; i += kLanes) {
      const int count = std::min(kLanes, vocab_size - i);
      uint32_t allowed = words ? words[i / 32] >> i % 32 : ~uint32_t{0};
      if (count < kLanes) allowed &= (uint32_t{1} << count) - 1;
      Floats score = splat(-kInfinity);
      if (allowed) {
        score = load_floats(logits + i, count);
        if (~allowed << (32 - kLanes)) score = ((Words{} + allowed) >> lane & 1) != 0 ? score : splat(-kInfinity);
      }
      nan |= (Words)(score != score);
      most = maximum(most, score);
      store(to + i, score);
    }
    std::fill(to + i, to + num_blocks * kBlock, -kInfinity);
    best = largest(most);
    for (int of = 0; of < kLanes; ++of) has_nan |= nan[of] != 0;
  }

  void weigh(float temperature) {
    float* const weights = scratch.weights.data();
    for (int i = 0; i < num_blocks * kBlock; i += kLanes) {
      const Floats power = (load<Floats>(weights + i) - best) / temperature * 1.44269504f;
      store(weights + i, exp2(power > splat(-200.0f) ? power : splat(-200.0f)));
    }
  }

  void filter(const Parameters& parameters) {
    const bool has_top_k = parameters.top_k > 0 && parameters.top_k < vocab_size;
    if (!has_top_k && parameters.min_p <= 0.0 && parameters.top_p >= 1.0) return;
    float floor = float(parameters.min_p);
    if (has_top_k) {
      count_weights(0.0f);
      floor = std::max(floor, largest_but(parameters.top_k));
    }
    if (parameters.top_p < 1.0) {
      count_weights(floor);
      floor = std::max(floor, nucleus_floor(parameters.top_p, floor));
    }
    float* const weights = scratch.weights.data();
    for (int i = 0; i < num_blocks * kBlock; i += kLanes) {
      const Floats weight = load<Floats>(weights + i);
      store(weights + i, weight < splat(floor) ? Floats{} : weight);
    }
  }

  // Fills the histogram with the positive weights that are not below the floor.
  void count_weights(float floor) {
    std::fill_n(scratch.counts, kBuckets, 0);
    std::fill_n(scratch.sums, kBuckets, 0.0);
    for (int i = 0; i < vocab_size; ++i) {
      const float weight = scratch.weights[i];
      if (weight < floor || weight == 0.0f) continue;
      const uint32_t bucket = bucket_of(weight);
      ++scratch.counts[bucket];
      scratch.sums[bucket] += weight;
    }
  }

  // Gathers a bucket's weights that are not below the floor, descending.
  std::vector<float>& sorted(uint32_t bucket, float floor) {
    std::vector<float>& found = scratch.bucket;
    found.clear();
    for (int i = 0; i < vocab_size; ++i) {
      const float weight = scratch.weights[i];
      if (bucket_of(weight) == bucket && weight >= floor && weight > 0.0f) found.push_back(weight);
    }
    std::sort(found.begin(), found.end(), std::greater<float>());
    return found;
  }

  // Returns the weight than which less than `count` weights are larger, 0 if fewer are positive.
  float largest_but(int64_t count) {
    for (int bucket = kBuckets - 1; bucket >= 0; --bucket) {
      if (scratch.counts[bucket] >= count) return sorted(bucket, 0.0f)[count - 1];
      count -= scratch.counts[bucket];
    }
    return 0.0f;
  }

  // Returns the smallest weight of the smallest set that reaches a share of what the histogram holds, all of it not
  // below `floor`; the smallest of all where rounding leaves the sum below that share.
  float nucleus_floor(double share, float floor) {
    double total = 0.0, reached = 0.0;
    for (const double sum : scratch.sums) total += sum;
    const double goal = total * share;
    float least = 0.0f;
    for (int bucket = kBuckets - 1; bucket >= 0; --bucket) {
      if (!scratch.counts[bucket]) continue;
      if (reached + scratch.sums[bucket] < goal) {
        reached += scratch.sums[bucket];
        continue;
      }
      for (const float weight : sorted(bucket, floor)) {
        reached += least = weight;
        if (reached >= goal) return weight;
      }
    }
    return least;
  }

  // Takes the first token whose running weight exceeds number x total, so its own weight is above 0.
  void walk(double number) {
    const float* const weights = scratch.weights.data();
    double total = 0.0;
    for (int block = 0; block < num_blocks; ++block) {
      Floats part{};
      for (int i = 0; i < kBlock; i += kLanes) part += load<Floats>(weights + block * kBlock + i);
      scratch.ends[block] = total += sum(part);
    }
    all.valid[row] = total > 0.0 && total < kInfinity;
    if (!all.valid[row]) return;
    const double target = std::min(total * number, std::nextafter(total, 0.0));
    const int block = std::upper_bound(scratch.ends.begin(), scratch.ends.end(), target) - scratch.ends.begin();
    const float* const inside = weights + block * kBlock;
    double left = target - (block ? scratch.ends[block - 1] : 0.0), reached = 0.0;
    int last = 0;  // where rounding leaves the sum below what is left, the last token with a weight
    for (int i = 0; i < kBlock; ++i) {
      if (inside[i] == 0.0f) continue;
      last = i;
      if ((reached += inside[i]) > left) break;
    }
    all.token_ids[row] = block * kBlock + last;
  }
};

}  // namespace

extern "C" void penstock_sample(const Sampling* sampling, int32_t num_threads) {
  const Sampling& all = *sampling;
  const int per_task = std::max(1, kValuesPerTask / all.vocab_size);
  thread_team::parallel_for(num_threads, (all.num_rows + per_task - 1) / per_task, [&](thread_team::Tasks& tasks) {
    static thread_local Scratch scratch;
    for (int task; tasks.take(task);)
      for (int row = task * per_task; row < std::min(all.num_rows, (task + 1) * per_task); ++row)
        Row(all, row, scratch).sample();
  });
}
