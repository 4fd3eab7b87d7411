// The planner behind planner.py: one object per engine, a task plan (tasks.py) written into the caller's buffer.
// It says what is wrong by a number; native_planner.py has the words.
#include <cstring>

#include "cutting.h"

namespace anabranch {

constexpr int kFresh = 1 << 16, kCausal = 1 << 17, kFreshShift = 18;  // flags of a task, as in tasks.py

int fresh_flags(int count) {
    const bool fits = count < 1 << (31 - kFreshShift);
    return (count ? kFresh : 0) | (fits ? count << kFreshShift : 0);
}

struct Layout {
    int n_bins, readers_per_task, max_rows, max_words, max_partials, max_slots;
    int pointers() const { return 8 * n_bins; }
    int words() const { return pointers() + (max_rows + 1 + 3) / 4 * 4; }
    bool operator==(const Layout& other) const { return !std::memcmp(this, &other, sizeof(Layout)); }
};

enum Outcome { kDone, kTooManyRows, kTooManyWords, kTooManyPartials, kTooManySlots, kMisfit };

// What planner.py learns: of a plan made, its counts; of one refused, how much was needed, or which request it was.
struct Report {
    int n_rows, n_tasks, n_readers, n_copies, n_slots;
    int64_t needed;
};

struct Word {
    int x, y, z, w;
};

class Planner {
  public:
    Contexts contexts;

    Planner(int64_t table_width, int tile) : table_width_(table_width), tile_(tile) {}

    // Whether slots of the row can be named in 32 bits.
    bool row_fits(int row) const { return row >= 0 && (row + (int64_t)1) * table_width_ <= INT_MAX; }

    // The number of intervals, or the first one that is not as it should be; -1 if the row is not.
    int set(int row, const int64_t* intervals, int n) {
        if (!row_fits(row)) return -1;
        const int fit = Contexts::fit(intervals, n, table_width_);
        if (fit == n) contexts.set(row, intervals, n);
        return fit;
    }

    Outcome plan(const Layout& layout, int n, const int* rows, const int* kv_lengths, const int* new_tokens,
                 int* buffer, Report& report) {
        report = {};
        grouped_ = grouped_ && layout == layout_;
        layout_ = layout;
        for (int i = 0; i < n; i++) {
            const int64_t kv = kv_lengths[i], n_new = new_tokens[i];
            if (n_new < 0 || kv < 0 || kv > table_width_ || !row_fits(rows[i]) ||
                (kv && n_new && kv < contexts[rows[i]].length + n_new)) {
                report.needed = i;
                return kMisfit;
            }
            report.needed += n_new;
        }
        if (report.needed > layout_.max_rows) return kTooManyRows;
        report.n_rows = (int)report.needed;
        const bool known = remember(n, rows, kv_lengths, new_tokens);
        if (!known) group(n, true);
        Outcome outcome = cut(kv_lengths, report);
        if (outcome != kDone && sharing_) {
            group(n, false);
            outcome = cut(kv_lengths, report);
        }
        if (outcome == kDone) write(kv_lengths, buffer, report);
        return outcome;
    }

  private:
    // A request as far as grouping depends on it.
    struct Seen {
        int row, n_new;
        bool busy;
        uint64_t version;
        bool operator==(const Seen& other) const {
            return row == other.row && n_new == other.n_new && busy == other.busy && version == other.version;
        }
    };

    struct Task {
        int slot, length, flags;
        int first_reader, n_readers;
        int first_seen;  // of its slots, what the first reader sees; the next one sees one more; none more than all
    };

    // Whether the step is of the same requests with the same contexts and layout as the one before.
    bool remember(int n, const int* rows, const int* kv_lengths, const int* new_tokens) {
        bool same = seen_.size() == (size_t)n && grouped_;
        seen_.resize(n);
        for (int i = 0; i < n; i++) {
            const Seen now{rows[i], new_tokens[i], kv_lengths[i] && new_tokens[i], contexts[rows[i]].version};
            same = same && seen_[i] == now;
            seen_[i] = now;
        }
        grouped_ = same;
        return same;
    }

    void group(int n, bool sharing) {
        grouping_.requests.start(n);
        int query = 0;
        for (int i = 0; i < n; i++) {
            if (seen_[i].busy) grouping_.requests.add({i, seen_[i].row, query, seen_[i].n_new, 0});
            query += seen_[i].n_new;
        }
        grouping_.group(contexts, table_width_, layout_.readers_per_task, sharing);
        cutting_.lay(grouping_.runs, layout_.readers_per_task, layout_.n_bins);
        grouped_ = true;
        sharing_ = sharing;
    }

    int own_tokens(const Run& run, const int* kv_lengths) const {
        if (run.own < 0) return 0;
        const Request& request = grouping_.requests[run.own];
        return kv_lengths[request.index] - contexts[request.row].length;
    }

    // Tasks in the order of their bins, and whether all fits.
    Outcome cut(const int* kv_lengths, Report& report) {
        const Pool<Run>& runs = grouping_.runs;
        lengths_.resize(runs.size());
        first_slot_.resize(runs.size());
        int64_t n_slots = 0;
        report.n_copies = grouping_.copies.size();
        for (int i = 0; i < runs.size(); i++) {
            lengths_[i] = runs[i].context_tokens + own_tokens(runs[i], kv_lengths);
            first_slot_[i] = (int)n_slots;
            n_slots += lengths_[i];
            report.n_copies += runs[i].own >= 0 && !runs[i].joined;
        }
        const auto too_many = [&](int64_t needed, int capacity) { report.needed = needed; return needed > capacity; };
        if (too_many(n_slots, layout_.max_slots)) return kTooManySlots;
        report.n_slots = (int)n_slots;
        cutting_.cut(lengths_, layout_.n_bins, tile_);
        make_tasks(report);
        if (too_many((int64_t)report.n_tasks + report.n_readers + report.n_copies, layout_.max_words))
            return kTooManyWords;
        if (too_many(report.n_readers, layout_.max_partials)) return kTooManyPartials;
        return kDone;
    }

    // Of a group, among the run's. Divisions are slow, and most runs have one group.
    static int first_reader(const Run& run, const Item& item, int group) {
        if (group == 0 || group == item.n_groups) return group ? run.n_readers : 0;
        return (int)((int64_t)run.n_readers * group / item.n_groups);
    }

    void make_tasks(Report& report) {
        const size_t most = grouping_.readers.size() + layout_.n_bins;
        unsorted_.start(most);
        places_.start(most);
        ends_.assign(2 * layout_.n_bins + 1, 0);
        int n_readers = 0;
        for (const Chunk& chunk : cutting_.chunks) {
            const Item& item = cutting_.items[chunk.item];
            const Run& run = grouping_.runs[item.run];
            const int n_new = run.own < 0 ? 0 : grouping_.requests[run.own].n_new;
            const int old = lengths_[item.run] - n_new;
            for (int lane = 0; lane < item.width; lane++) {
                const int group = item.first_group + lane;
                int first = first_reader(run, item, group);
                const int stop = first_reader(run, item, group + 1);
                int first_seen = chunk.length, length = chunk.length;
                if (run.own >= 0) {
                    first = std::max(first, chunk.begin - old);  // new tokens before see nothing of it
                    if (first >= stop) continue;
                    first_seen = std::min(length, old + first + 1 - chunk.begin);
                    length = std::min(length, old + stop - chunk.begin);
                }
                const int n_fresh = std::min(std::max(chunk.begin + length - old, 0), length);
                const int flags = fresh_flags(n_fresh) | (first_seen < length ? kCausal : 0);
                unsorted_.add({first_slot_[item.run] + chunk.begin, length, flags, run.first_reader + first,
                               stop - first, first_seen});
                places_.add(2 * (chunk.first_bin + lane) + (n_fresh > 0));
                ends_[places_.back() + 1]++;
                n_readers += stop - first;
            }
        }
        for (int i = 0; i < 2 * layout_.n_bins; i++) ends_[i + 1] += ends_[i];
        tasks_.resize(unsorted_.size());
        for (int i = 0; i < unsorted_.size(); i++) tasks_[ends_[places_[i]]++] = unsorted_[i];
        report.n_tasks = (int)tasks_.size();
        report.n_readers = n_readers;
    }

    void write(const int* kv_lengths, int* buffer, const Report& report) {
        int* pointers = buffer + layout_.pointers();
        Word* words = reinterpret_cast<Word*>(buffer + layout_.words());
        next_partial_.assign(report.n_rows, 0);
        for (const Task& task : tasks_)
            for (int i = 0; i < task.n_readers; i++) next_partial_[grouping_.readers[task.first_reader + i].row]++;
        int n_partials = 0;
        for (int row = 0; row < report.n_rows; row++) {
            pointers[row] = n_partials;
            n_partials += next_partial_[row];
            next_partial_[row] = pointers[row];
        }
        std::fill(pointers + report.n_rows, buffer + layout_.words(), n_partials);

        int word = report.n_tasks;
        for (int i = 0; i < report.n_tasks; i++) {
            const Task& task = tasks_[i];
            words[i] = {task.slot, task.length, word, task.n_readers | task.flags};
            for (int k = 0; k < task.n_readers; k++) {
                const Reader& reader = grouping_.readers[task.first_reader + k];
                const int seen = std::min(task.first_seen + k, task.length);
                words[word++] = {reader.row, reader.delta, next_partial_[reader.row]++, seen};
            }
        }
        write_copies(kv_lengths, words + word);
        Word* bins = reinterpret_cast<Word*>(buffer);
        for (int bin = 0, first = 0; bin < layout_.n_bins; bin++) {
            const int stop = ends_[2 * bin + 1];  // placing moved each end to the next one's
            bins[2 * bin] = {first, stop, 0, 0};
            bins[2 * bin + 1] = first < stop ? words[first] : Word{0, 0, 0, 0};
            first = stop;
        }
    }

    void write_copies(const int* kv_lengths, Word* words) {
        int target = 0;
        const auto copy = [&](int source, int length) {
            *words++ = {source, target, length, 0};
            target += length;
        };
        for (const Run& run : grouping_.runs) {
            const int own = own_tokens(run, kv_lengths);
            for (int i = 0; i < run.n_copies; i++) {
                const Copy& one = grouping_.copies[run.first_copy + i];
                copy(one.source, one.length + (run.joined && i == run.n_copies - 1 ? own : 0));
            }
            if (run.own >= 0 && !run.joined) {
                const Request& request = grouping_.requests[run.own];
                copy((int)(request.row * table_width_) + contexts[request.row].length, own);
            }
        }
    }

    Layout layout_{};  // of the step
    const int64_t table_width_;
    const int tile_;
    Grouping grouping_;
    Cutting cutting_;
    bool grouped_ = false, sharing_ = false;
    std::vector<Seen> seen_;
    std::vector<int> lengths_, first_slot_;  // of the runs
    Pool<Task> unsorted_;
    std::vector<Task> tasks_;
    Pool<int> places_;       // of unsorted tasks: twice the bin, one more if it must wait
    std::vector<int> ends_;  // of tasks at each place
    std::vector<int> next_partial_;
};

}  // namespace anabranch

extern "C" {

using anabranch::Planner;

Planner* planner_open(int64_t table_width, int tile) { return new Planner(table_width, tile); }
void planner_close(Planner* planner) { delete planner; }
int planner_set(Planner* planner, int row, const int64_t* intervals, int n) { return planner->set(row, intervals, n); }
void planner_forget(Planner* planner, int row) { planner->contexts.forget(row); }
int planner_n_keys(Planner* planner) { return planner->contexts.n_keys(); }
int planner_plan(Planner* planner, const anabranch::Layout* layout, int n, const int* rows, const int* kv_lengths,
                 const int* new_tokens, int* buffer, anabranch::Report* report) {
    return planner->plan(*layout, n, rows, kv_lengths, new_tokens, buffer, *report);
}
}
