/* Offsets of a partition that were assigned, as intervals: sort them and join neighbours. No Python here. */
#ifndef KPROXY_SPANS_H
#define KPROXY_SPANS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Offsets from `start` to before `end`. */
typedef struct {
    int64_t start, end;
} kp_interval;

/* Sort by start. Each connection's intervals come in order, so what is sorted are few runs: they are merged two by two.
 * `spare` has room for `count` as well. Return where the sorted ones are, `all` or `spare`. */
static inline kp_interval *kp_sort_intervals(kp_interval *all, kp_interval *spare, size_t count) {
    for (;;) {
        size_t from = 0, runs = 0, to = 0;
        while (from < count) {
            size_t middle = from + 1, end;
            while (middle < count && all[middle - 1].start <= all[middle].start) middle++;
            if (middle == count && !runs) return all;
            runs++;
            for (end = middle < count ? middle + 1 : middle; end < count && all[end - 1].start <= all[end].start;) end++;
            size_t left = from, right = middle;
            while (left < middle && right < end)
                spare[to++] = all[right].start < all[left].start ? all[right++] : all[left++];
            memcpy(spare + to, all + left, (middle - left) * sizeof *all);
            to += middle - left;
            memcpy(spare + to, all + right, (end - right) * sizeof *all);
            to += end - right;
            from = end;
        }
        kp_interval *sorted = spare;
        spare = all;
        all = sorted;
        if (runs <= 1) return all;
    }
}

/* Join sorted intervals where one begins at the other's end. Return how many are left, 0 if two have an offset in
 * common. */
static inline size_t kp_join_intervals(kp_interval *all, size_t count) {
    size_t last = 0;
    for (size_t at = 1; at < count; at++) {
        if (all[at].start < all[last].end) return 0;
        if (all[at].start == all[last].end)
            all[last].end = all[at].end;
        else
            all[++last] = all[at];
    }
    return count ? last + 1 : 0;
}

#endif
