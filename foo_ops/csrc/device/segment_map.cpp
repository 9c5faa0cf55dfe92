#include "device/segment_map.h"

namespace foo::device {

SegmentMap& segment_map() {
  static auto* map = new SegmentMap();
  return *map;
}

std::optional<c10::DeviceIndex> device_of_address(const void* address) {
  return segment_map().find(address);
}

}  // namespace foo::device
