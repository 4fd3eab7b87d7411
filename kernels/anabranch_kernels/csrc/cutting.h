// Cutting: runs of known lengths laid in one line and cut into bins of the smallest capacity that suffices.
// It knows no contexts and writes no plan. numpy_cutting.py says the same slowly.
#pragma once

#include <algorithm>

#include "grouping.h"

namespace anabranch {

constexpr int kLockStep = 8;     // reader groups of one run that are cut alike into neighbouring bins
constexpr int kResolution = 16;  // bin capacities are tried to so many tokens

struct Item {
    int run;
    int first_group, width;  // these of its groups of readers, in lock step
    int n_groups;            // of the run
    int cost;                // of each task besides its tokens
};

// Slots begin .. begin + length of the item's run, for its groups in bins first_bin and on.
struct Chunk {
    int item, first_bin, begin, length;
};

class Cutting {
  public:
    Pool<Item> items;
    Pool<Chunk> chunks;

    void lay(const Pool<Run>& runs, int readers_per_task, int n_bins) {
        size_t most = 0;
        for (const Run& run : runs) most += run.n_readers;
        items.start(most);
        stretches_.clear();
        const int widest = std::min(kLockStep, n_bins);
        for (int run = 0; run < runs.size(); run++) {
            const int n_readers = runs[run].n_readers;
            const int n_groups = n_readers <= readers_per_task ? 1 : (n_readers - 1) / readers_per_task + 1;
            const int biggest = n_groups == 1 ? n_readers : (n_readers - 1) / n_groups + 1;
            const int cost = kTaskTokens + kTaskTokens * biggest / readers_per_task;
            const int n_items = n_groups <= widest ? 1 : (n_groups - 1) / widest + 1;
            for (int i = 0, first = 0; i < n_items; i++) {
                const int stop = i + 1 == n_items ? n_groups : n_groups * (i + 1) / n_items;
                if (stretches_.empty() || stretches_.back().width != stop - first)
                    stretches_.push_back({stop - first, 0});
                items.add({run, first, stop - first, n_groups, cost});
                stretches_.back().stop = items.size();
                first = stop;
            }
        }
    }

    // Sets `chunks`. lengths: of the runs.
    void cut(const std::vector<int>& lengths, int n_bins, int tile) {
        chunks.start(items.size() + n_bins);
        if (items.empty()) return;
        ends_.resize(items.size() + 1);
        ends_[0] = 0;
        int64_t total = 0;
        int low_cost = 0;
        for (int i = 0; i < items.size(); i++) {
            const int64_t whole = (int64_t)lengths[items[i].run] + items[i].cost;
            ends_[i + 1] = ends_[i] + whole;
            total += items[i].width * whole;
            low_cost = std::max(low_cost, items[i].cost);
        }
        int64_t low = std::max<int64_t>(low_cost + tile, (total + n_bins - 1) / n_bins);
        int64_t high = low;
        while (!fill<false>(n_bins, tile, high)) {
            low = high;
            high += std::max<int64_t>(tile, high / 16);
        }
        while (high - low > kResolution) {
            const int64_t middle = (low + high) / 2;
            (fill<false>(n_bins, tile, middle) ? high : low) = middle;
        }
        fill<true>(n_bins, tile, high);
    }

  private:
    // Items up to `stop`, after those of the stretch before, that have the same width.
    struct Stretch {
        int width, stop;
    };

    // Whether the line fits into bins of this capacity. Whole items that fit a bin are found by searching in `ends_`.
    template <bool keep>
    bool fill(int n_bins, int tile, int64_t capacity) {
        loads_.assign(n_bins, 0);
        int bin = 0, item = 0;
        int64_t begin = 0;  // what of the item has gone into bins before
        for (const Stretch& stretch : stretches_) {
            while (item < stretch.stop) {
                if (bin + stretch.width > n_bins) return false;
                const int64_t load = *std::max_element(loads_.begin() + bin, loads_.begin() + bin + stretch.width);
                const auto limit = ends_.begin() + stretch.stop + 1;
                const auto end = std::upper_bound(ends_.begin() + item + 1, limit, ends_[item] + begin + capacity - load);
                const int stop = (int)(end - ends_.begin()) - 1;
                int64_t used = 0;
                if (stop > item) {
                    used = ends_[stop] - ends_[item] - begin;
                    for (; keep && item < stop; item++, begin = 0)
                        chunks.add({item, bin, (int)begin, (int)(length(item) - begin)});
                    item = stop;
                    begin = 0;
                }
                bool full = item < stretch.stop;
                if (full) {
                    const int64_t room = capacity - load - used - items[item].cost;
                    const int64_t part = room < tile ? 0 : room / tile * tile;
                    if (part) {
                        if (keep) chunks.add({item, bin, (int)begin, (int)part});
                        used += part + items[item].cost;
                        begin += part;
                    }
                }
                for (int lane = bin; lane < bin + stretch.width; lane++) loads_[lane] += used;
                if (full) bin += stretch.width;
            }
        }
        return true;
    }

    int64_t length(int item) const { return ends_[item + 1] - ends_[item] - items[item].cost; }

    std::vector<Stretch> stretches_;
    std::vector<int64_t> ends_;  // of each item in the line, in tokens with costs; 0 before the first
    std::vector<int64_t> loads_;
};

}  // namespace anabranch
