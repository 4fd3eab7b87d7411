// Grouping: which tokens of a step are seen by the same readers, and where sharing pays. It looks at contexts only.
// It knows neither how many own tokens there are nor any bin. numpy_grouping.py says the same slowly.
#pragma once

#include <algorithm>
#include <numeric>

#include "contexts.h"
#include "pool.h"

namespace anabranch {

constexpr int kTaskTokens = 64;  // what a task costs besides its tokens and its partial results

struct Request {
    int index, row;
    int first_query, n_new;
    int first_member;  // its members are numbered by delta
};

struct Reader {
    int row, delta;
};

struct Copy {
    int source, length;
};

struct Run {
    int first_reader, n_readers;
    int first_copy, n_copies;
    int context_tokens;
    int own;      // the request whose own tokens end it, or -1
    bool joined;  // and they follow the last copy's source without a gap
};

class Grouping {
  public:
    Pool<Request> requests;
    Pool<Run> runs;  // in the order of the line: most readers first, then in order of first use
    Pool<Reader> readers;
    Pool<Copy> copies;

    // `requests` are set, up to `first_member`.
    void group(const Contexts& contexts, int64_t table_width, int readers_per_task, bool sharing) {
        readers_per_task_ = readers_per_task;
        enter(contexts, sharing);
        discover();
        dissolve();
        collect(contexts, (int)table_width);
        put_in_line();
    }

  private:
    // An interval as one request sees it.
    struct Entry {
        const Interval* interval;
        int member;
        int next_of_key;             // next entry with this key
        int first_cover, last_cover;  // its parts, if others see its key too
    };
    struct Member {
        int request, delta;
        bool has_private;
        int run;  // its private run, once there is one
    };
    // Tokens of one key that no interval divides, seen by n_entries entries, at first_entry in part_entries_.
    struct Part {
        int start, stop;
        int first_entry, n_entries;
        int shared;
    };
    struct Cover {
        int part, next;
    };
    struct Shared {
        int first_member, n_members;  // in shared_members_
        int tokens;
        int next_of_hash;
        bool dissolved;
        int run;
    };
    struct Piece {
        int source, length, next;
    };
    struct OpenRun {
        int first_member, n_members;  // in shared_members_, or the member itself
        bool is_private;
        int n_readers, first_piece, last_piece, n_pieces, tokens, own;
        bool joined;
    };

    int groups(int n_readers) const { return (n_readers + readers_per_task_ - 1) / readers_per_task_; }
    int overhead(int n_readers) const {
        return kTaskTokens * groups(n_readers) + kTaskTokens * n_readers / readers_per_task_;
    }
    int rows_of(int member) const { return requests[members_[member].request].n_new; }

    void enter(const Contexts& contexts, bool sharing) {
        size_t n_entries = 0, n_members = 0;
        for (const Request& request : requests) {
            n_entries += contexts[request.row].intervals.size();
            n_members += contexts[request.row].deltas.size();
        }
        entries_.start(n_entries);
        members_.start(n_members);
        first_of_key_.assign(contexts.n_keys(), -1);
        last_of_key_.resize(contexts.n_keys());
        for (Request& request : requests) {
            const Context& context = contexts[request.row];
            request.first_member = members_.size();
            for (int delta : context.deltas) members_.add({(int)(&request - requests.begin()), delta, false, -1});
            members_[request.first_member].has_private = true;  // its own tokens
            for (const Interval& interval : context.intervals) {
                const int number = entries_.size(), key = interval.key;
                entries_.add({&interval, request.first_member + interval.delta_number, -1, -1, -1});
                if (!sharing) continue;
                (first_of_key_[key] < 0 ? first_of_key_[key] : entries_[last_of_key_[key]].next_of_key) = number;
                last_of_key_[key] = number;
            }
        }
    }

    // Find the parts, the shared runs, and which members have a private run anyway.
    void discover() {
        parts_.start(0);
        part_entries_.start(0);
        covers_.start(0);
        shared_.start(0);
        shared_members_.start(0);
        by_hash_.clear();
        for (int number = 0; number < entries_.size(); number++) {
            Entry& entry = entries_[number];
            if (first_of_key_[entry.interval->key] == number && entry.next_of_key >= 0) divide(number);
            if (entry.first_cover < 0) members_[entry.member].has_private = true;
            for (int cover = entry.first_cover; cover >= 0; cover = covers_[cover].next) {
                Part& part = parts_[covers_[cover].part];
                if (part_entries_[part.first_entry] != number) continue;
                if (part.n_entries == 1)
                    members_[entry.member].has_private = true;
                else
                    share(part);
            }
        }
    }

    // The parts of all entries with the key of entry `first`.
    void divide(int first) {
        same_key_.clear();
        bool alike = true;
        for (int number = first; number >= 0; number = entries_[number].next_of_key) {
            same_key_.push_back(number);
            alike &= entries_[number].interval->start == entries_[first].interval->start &&
                     entries_[number].interval->stop == entries_[first].interval->stop;
        }
        if (alike) return add_part(entries_[first].interval->start, entries_[first].interval->stop, same_key_);

        const auto start = [&](int number) { return entries_[number].interval->start; };
        const auto stop = [&](int number) { return entries_[number].interval->stop; };
        ends_.clear();
        for (int number : same_key_) ends_.insert(ends_.end(), {start(number), stop(number)});
        std::sort(ends_.begin(), ends_.end());
        ends_.erase(std::unique(ends_.begin(), ends_.end()), ends_.end());
        std::stable_sort(same_key_.begin(), same_key_.end(), [&](int a, int b) { return start(a) < start(b); });
        covering_.clear();
        size_t next = 0;
        for (size_t end = 0; end + 1 < ends_.size(); end++) {
            const auto over = [&](int number) { return stop(number) == ends_[end]; };
            covering_.erase(std::remove_if(covering_.begin(), covering_.end(), over), covering_.end());
            for (; next < same_key_.size() && start(same_key_[next]) == ends_[end]; next++) {
                const int number = same_key_[next];
                covering_.insert(std::lower_bound(covering_.begin(), covering_.end(), number), number);
            }
            if (!covering_.empty()) add_part(ends_[end], ends_[end + 1], covering_);
        }
    }

    void add_part(int start, int stop, const std::vector<int>& numbers) {
        const int part = parts_.size();
        parts_.make_room(1);
        parts_.add({start, stop, part_entries_.size(), (int)numbers.size(), -1});
        part_entries_.make_room(numbers.size());
        part_entries_.add(numbers.data(), numbers.size());
        covers_.make_room(numbers.size());
        for (int number : numbers) {
            Entry& entry = entries_[number];
            (entry.first_cover < 0 ? entry.first_cover : covers_[entry.last_cover].next) = covers_.size();
            entry.last_cover = covers_.size();
            covers_.add({part, -1});
        }
    }

    // Add a part to the shared run of those who see it.
    void share(Part& part) {
        const int first = shared_members_.size();
        shared_members_.make_room(part.n_entries);
        for (int i = 0; i < part.n_entries; i++)
            shared_members_.add(entries_[part_entries_[part.first_entry + i]].member);
        int* const members = shared_members_.begin() + first;
        if (!std::is_sorted(members, shared_members_.end())) std::sort(members, shared_members_.end());
        uint64_t hash = 0;
        for (const int* member = members; member != shared_members_.end(); ++member)
            hash = (hash ^ (uint64_t)*member) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
        const auto [known, is_new] = by_hash_.try_emplace(hash, -1);
        for (int run = known->second; run >= 0; run = shared_[run].next_of_hash) {
            Shared& one = shared_[run];
            if (one.n_members == part.n_entries &&
                std::equal(members, shared_members_.end(), shared_members_.begin() + one.first_member)) {
                shared_members_.cut(first);
                part.shared = run;
                one.tokens += part.stop - part.start;
                return;
            }
        }
        part.shared = shared_.size();
        shared_.make_room(1);
        shared_.add({first, part.n_entries, part.stop - part.start, known->second, false, -1});
        known->second = part.shared;
    }

    // Where reading once for each member costs less than tasks of their own; shortest runs first.
    void dissolve() {
        order_.resize(shared_.size());
        std::iota(order_.begin(), order_.end(), 0);
        std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return shared_[a].tokens < shared_[b].tokens; });
        for (int number : order_) {
            Shared& run = shared_[number];
            const int* members = shared_members_.begin() + run.first_member;
            int n_readers = 0;
            int64_t apart = 0;
            for (int i = 0; i < run.n_members; i++) {
                const int rows = rows_of(members[i]);
                n_readers += rows;
                apart += (int64_t)groups(rows) * run.tokens;
                if (!members_[members[i]].has_private) apart += overhead(rows);
            }
            run.dissolved = apart < (int64_t)groups(n_readers) * run.tokens + overhead(n_readers);
            if (run.dissolved)
                for (int i = 0; i < run.n_members; i++) members_[members[i]].has_private = true;
        }
    }

    // Where the slots of each run are found, in the order of the entries.
    void collect(const Contexts& contexts, int table_width) {
        open_.start(members_.size() + shared_.size());
        pieces_.start(entries_.size() + covers_.size());
        int number = 0;
        for (int own = 0; own < requests.size(); own++) {
            const Request& request = requests[own];
            const Context& context = contexts[request.row];
            const int row_start = request.row * table_width;
            for (const int stop = number + (int)context.intervals.size(); number < stop; number++) {
                const Entry& entry = entries_[number];
                const int start = row_start + entry.interval->at - entry.interval->start;
                if (entry.first_cover < 0)
                    add_piece(private_run(entry.member), start + entry.interval->start,
                              entry.interval->stop - entry.interval->start);
                for (int cover = entry.first_cover; cover >= 0; cover = covers_[cover].next) {
                    const Part& part = parts_[covers_[cover].part];
                    if (part.shared < 0 || shared_[part.shared].dissolved)
                        add_piece(private_run(entry.member), start + part.start, part.stop - part.start);
                    else if (part_entries_[part.first_entry] == number)
                        add_piece(shared_run(part.shared), start + part.start, part.stop - part.start);
                }
            }
            OpenRun& run = private_run(request.first_member);
            run.own = own;
            run.joined = run.last_piece >= 0 && end_of(pieces_[run.last_piece]) == row_start + context.length;
        }
    }

    static int end_of(const Piece& piece) { return piece.source + piece.length; }

    void add_piece(OpenRun& run, int source, int length) {
        run.tokens += length;
        if (run.last_piece >= 0 && end_of(pieces_[run.last_piece]) == source) {
            pieces_[run.last_piece].length += length;
            return;
        }
        const int piece = pieces_.size();
        pieces_.add({source, length, -1});
        (run.last_piece < 0 ? run.first_piece : pieces_[run.last_piece].next) = piece;
        run.last_piece = piece;
        run.n_pieces++;
    }

    OpenRun& private_run(int member) {
        if (members_[member].run < 0) {
            members_[member].run = open_.size();
            open_.add({member, 1, true, rows_of(member), -1, -1, 0, 0, -1, false});
        }
        return open_[members_[member].run];
    }

    OpenRun& shared_run(int number) {
        Shared& shared = shared_[number];
        if (shared.run < 0) {
            int n_readers = 0;
            for (int i = 0; i < shared.n_members; i++) n_readers += rows_of(shared_members_[shared.first_member + i]);
            shared.run = open_.size();
            open_.add({shared.first_member, shared.n_members, false, n_readers, -1, -1, 0, 0, -1, false});
        }
        return open_[shared.run];
    }

    void put_in_line() {
        order_.resize(open_.size());
        std::iota(order_.begin(), order_.end(), 0);
        const auto more = [&](int a, int b) { return open_[a].n_readers > open_[b].n_readers; };
        if (!std::is_sorted(order_.begin(), order_.end(), more)) std::stable_sort(order_.begin(), order_.end(), more);
        size_t n_readers = 0;
        for (const OpenRun& run : open_) n_readers += run.n_readers;
        runs.start(open_.size());
        readers.start(n_readers);
        copies.start(pieces_.size());
        for (int number : order_) {
            const OpenRun& run = open_[number];
            const int* members = run.is_private ? &run.first_member : shared_members_.begin() + run.first_member;
            runs.add({readers.size(), run.n_readers, copies.size(), run.n_pieces, run.tokens, run.own, run.joined});
            for (int i = 0; i < run.n_members; i++) {
                const Request& request = requests[members_[members[i]].request];
                for (int query = 0; query < request.n_new; query++)
                    readers.add({request.first_query + query, members_[members[i]].delta});
            }
            for (int piece = run.first_piece; piece >= 0; piece = pieces_[piece].next)
                copies.add({pieces_[piece].source, pieces_[piece].length});
        }
    }

    int readers_per_task_ = 1;
    Pool<Entry> entries_;
    Pool<Member> members_;
    Pool<Part> parts_;
    Pool<int> part_entries_;
    Pool<Cover> covers_;
    Pool<Shared> shared_;
    Pool<int> shared_members_;
    std::unordered_map<uint64_t, int> by_hash_;
    Pool<OpenRun> open_;
    Pool<Piece> pieces_;
    std::vector<int> first_of_key_, last_of_key_, same_key_, ends_, covering_, order_;
};

}  // namespace anabranch
