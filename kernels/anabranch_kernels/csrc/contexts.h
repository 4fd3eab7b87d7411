// What each row of the table of slots has as its context. Keys are numbered here, so that a step needs no hashing.
// It plans nothing.
#pragma once

#include <climits>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace anabranch {

struct Interval {
    int key;  // its number
    int start, stop;
    int delta_number;
    int at;  // where it begins in the context
};

struct Context {
    std::vector<Interval> intervals;  // none without tokens
    std::vector<int> deltas{0};       // by number: 0 first, then in order of use
    int length = 0;
    uint64_t version = 0;  // 0: nothing was set
};

class Contexts {
  public:
    // table: {key, start, stop, delta} of n intervals, which all fit().
    void set(int row, const int64_t* table, int n) {
        Context context;
        std::unordered_map<int64_t, int> delta_numbers{{0, 0}};
        for (const int64_t* one = table; one != table + 4 * n; one += 4) {
            const int64_t key = one[0], start = one[1], stop = one[2], delta = one[3];
            if (stop == start) continue;
            const auto [known, is_new] = delta_numbers.try_emplace(delta, (int)delta_numbers.size());
            if (is_new) context.deltas.push_back((int)delta);
            context.intervals.push_back({retain(key), (int)start, (int)stop, known->second, context.length});
            context.length += (int)(stop - start);
        }
        context.version = ++version_;
        forget(row);  // after the keys of the new context are retained: those in both keep their number
        if ((size_t)row >= rows_.size()) rows_.resize(row + 1);
        rows_[row] = std::move(context);
    }

    // The first interval with which the table is not one that a row of so many tokens can have; n if there is none.
    static int fit(const int64_t* table, int n, int64_t table_width) {
        int64_t tokens = 0;
        for (int i = 0; i < n; i++) {
            const int64_t start = table[4 * i + 1], stop = table[4 * i + 2], delta = table[4 * i + 3];
            if (start < 0 || stop < start || stop > INT_MAX || delta < INT_MIN || delta > INT_MAX) return i;
            if ((tokens += stop - start) > table_width) return i;
        }
        return n;
    }

    void forget(int row) {
        if (row < 0 || (size_t)row >= rows_.size()) return;
        for (const Interval& interval : rows_[row].intervals) release(interval.key);
        rows_[row] = Context();
    }

    // Valid until the next `set`.
    const Context& operator[](int row) const { return (size_t)row < rows_.size() ? rows_[row] : nothing_; }

    // Numbers of keys are below this; those of keys that are gone are given again.
    int n_keys() const { return (int)keys_.size(); }

  private:
    struct Key {
        int64_t key;
        int uses;
    };

    int retain(int64_t key) {
        const auto [known, is_new] = numbers_.try_emplace(key, 0);
        if (is_new && free_.empty()) {
            known->second = (int)keys_.size();
            keys_.push_back({key, 0});
        } else if (is_new) {
            known->second = free_.back();
            free_.pop_back();
            keys_[known->second] = {key, 0};
        }
        keys_[known->second].uses++;
        return known->second;
    }

    void release(int number) {
        if (--keys_[number].uses) return;
        numbers_.erase(keys_[number].key);
        free_.push_back(number);
    }

    const Context nothing_;
    std::vector<Context> rows_;
    std::unordered_map<int64_t, int> numbers_;
    std::vector<Key> keys_;
    std::vector<int> free_;
    uint64_t version_ = 0;
};

}  // namespace anabranch
