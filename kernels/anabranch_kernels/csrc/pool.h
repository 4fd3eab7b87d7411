// A list whose room is made before it is filled, so that adding to it is one store: several times faster than
// std::vector::push_back, which looks for room each time.
#pragma once

#include <cstddef>
#include <vector>

namespace anabranch {

template <class T>
class Pool {
  public:
    // Empty, with room for so many.
    void start(size_t room) {
        size_ = 0;
        make_room(room);
    }
    // Room for so many more.
    void make_room(size_t more) {
        if (items_.size() < size_ + more) items_.resize(2 * items_.size() + size_ + more);
    }
    void add(const T& item) { items_[size_++] = item; }
    void add(const T* items, size_t n) {
        for (size_t i = 0; i < n; i++) add(items[i]);
    }
    void cut(size_t size) { size_ = size; }

    int size() const { return (int)size_; }
    bool empty() const { return size_ == 0; }
    T& operator[](size_t i) { return items_[i]; }
    const T& operator[](size_t i) const { return items_[i]; }
    T* begin() { return items_.data(); }
    T* end() { return items_.data() + size_; }
    const T* begin() const { return items_.data(); }
    const T* end() const { return items_.data() + size_; }
    T& back() { return items_[size_ - 1]; }

  private:
    std::vector<T> items_;
    size_t size_ = 0;
};

}  // namespace anabranch
